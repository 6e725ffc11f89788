"""PyTorch's DTensor API, executed by XLA's SPMD partitioner.

Importing it installs the "xla" device and the xla mesh into torch; JAX starts on first use.
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from xla_dtensor import ecosystem, integration
from xla_dtensor.base.config import config
from xla_dtensor.version import VERSION as __version__  # noqa: F401

integration.install()
ecosystem.install()

from xla_dtensor.errors import (  # noqa: E402  (the device must exist first)
    CheckpointError,
    CompiledFileError,
    DataDependentError,
    DeviceCountError,
    DistributedError,
    DivergenceError,
    HostsError,
    LayoutRuleError,
    MeshDimError,
    MeshError,
    MeshMismatchError,
    NotInStepError,
    PerDeviceValueError,
    PipelineError,
    PlacementError,
    RandomNumbersError,
    StaleStepError,
    TopologyError,
    UnsupportedOpError,
    XlaDTensorError,
)

# Loaded on first use: these import JAX, or torch.distributed.tensor, which takes long.
_LAZY = {
    "Buckets": "xla_dtensor.compilation",
    "CompiledStep": "xla_dtensor.compilation",
    "DFunction": "xla_dtensor.custom_ops",
    "DistributedOp": "xla_dtensor.custom_ops",
    "FSDPModule": "xla_dtensor.parallel",
    "Layout": "xla_dtensor.mesh.layout",
    "MixedPrecisionPolicy": "xla_dtensor.parallel",
    "OffloadPolicy": "xla_dtensor.parallel",
    "Partial": "torch.distributed.tensor.placement_types",
    "ReplayedStep": "xla_dtensor.compilation",
    "Replicate": "torch.distributed.tensor.placement_types",
    "Shard": "torch.distributed.tensor.placement_types",
    "XLADeviceMesh": "xla_dtensor.mesh",
    "XLAShardedTensor": "xla_dtensor.tensors.sharded_tensor",
    "XLATensor": "xla_dtensor.tensors.device_tensor",
    "abstract": "xla_dtensor.planning",
    "compile": "xla_dtensor.compilation",
    "distribute_module": "xla_dtensor.movement.factories",
    "distribute_tensor": "xla_dtensor.movement.factories",
    "explain": "xla_dtensor.debug",
    "from_device_values": "xla_dtensor.movement.device_values",
    "from_jax": "xla_dtensor.movement.jax_arrays",
    "fully_shard": "xla_dtensor.parallel",
    "get_mesh": "xla_dtensor.mesh",
    "jax_function": "xla_dtensor.custom_ops",
    "load_compiled": "xla_dtensor.compilation",
    "plan": "xla_dtensor.planning",
    "register_rule": "xla_dtensor.rules",
    "replicate": "xla_dtensor.parallel",
    "scan_layers": "xla_dtensor.compilation",
    "set_mesh": "xla_dtensor.mesh",
    "to_jax": "xla_dtensor.movement.jax_arrays",
    "transfer": "xla_dtensor.weights",
    "tune": "xla_dtensor.tuning",
}
_MODULES = {
    "checkpoint": "xla_dtensor.checkpoint",
    "collectives": "xla_dtensor.movement.collectives",
    "data": "xla_dtensor.data",
    "debug": "xla_dtensor.debug",
    "distributed": "xla_dtensor.runtime.distributed",
    "elastic": "xla_dtensor.elastic",
    "jax": "xla_dtensor.jax_programs",
    "metrics": "xla_dtensor.metrics",
    "parallel": "xla_dtensor.parallel",
    "pipeline": "xla_dtensor.pipeline",
    "row_exchange": "xla_dtensor.movement.row_exchange",
    "rules": "xla_dtensor.rules",
    "weights": "xla_dtensor.weights",
}

# Old names, which stay for one release: where their values are, and what to write instead.
_RENAMED = {
    "Explanation": ("xla_dtensor.debug", "xd.debug.Explanation"),
    "PipelineSchedule": ("xla_dtensor.pipeline", "xd.pipeline.PipelineSchedule"),
    "PipelineStage": ("xla_dtensor.pipeline", "xd.pipeline.PipelineStage"),
    "ReplicateModule": ("xla_dtensor.parallel", "xd.parallel.ReplicateModule"),
    "ShardedLoader": ("xla_dtensor.data", "xd.data.ShardedLoader"),
    "axis_index": ("xla_dtensor.movement.collectives", "xd.collectives.axis_index"),
    "check_indices": ("xla_dtensor.base.assertions", "xd.config.checks"),
    "offload_state": ("xla_dtensor.parallel", "xd.parallel.offload_state"),
    "parallelize": ("xla_dtensor.parallel", "xd.parallel.parallelize"),
    "scan_equal_layers": ("xla_dtensor.compilation.scan.equal", "xd.scan_layers"),
    "shard_batch": ("xla_dtensor.data", "xd.data.shard_batch"),
    "shard_by_size": ("xla_dtensor.parallel", "xd.parallel.shard_by_size"),
    "stage_meshes": ("xla_dtensor.pipeline", "xd.pipeline.stage_meshes"),
    "zero": ("xla_dtensor.parallel", "xd.parallel.zero"),
}

__all__ = [
    "Buckets",
    "CheckpointError",
    "CompiledFileError",
    "CompiledStep",
    "DFunction",
    "DataDependentError",
    "DeviceCountError",
    "DeviceMesh",
    "DistributedError",
    "DistributedOp",
    "DivergenceError",
    "FSDPModule",
    "HostsError",
    "Layout",
    "LayoutRuleError",
    "MeshDimError",
    "MeshError",
    "MeshMismatchError",
    "MixedPrecisionPolicy",
    "NotInStepError",
    "OffloadPolicy",
    "Partial",
    "PerDeviceValueError",
    "PipelineError",
    "PlacementError",
    "RandomNumbersError",
    "ReplayedStep",
    "Replicate",
    "Shard",
    "StaleStepError",
    "TopologyError",
    "UnsupportedOpError",
    "XLADeviceMesh",
    "XLAShardedTensor",
    "XLATensor",
    "XlaDTensorError",
    "abstract",
    "checkpoint",
    "collectives",
    "compile",
    "config",
    "data",
    "debug",
    "distribute_module",
    "distribute_tensor",
    "distributed",
    "elastic",
    "explain",
    "from_device_values",
    "from_jax",
    "fully_shard",
    "get_mesh",
    "init_device_mesh",
    "jax",
    "jax_function",
    "load_compiled",
    "metrics",
    "parallel",
    "pipeline",
    "plan",
    "register_rule",
    "replicate",
    "row_exchange",
    "rules",
    "scan_layers",
    "set_mesh",
    "to_jax",
    "transfer",
    "tune",
    "weights",
]


def __getattr__(name: str) -> Any:
    import importlib
    import warnings

    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    if name in _RENAMED:
        module, new = _RENAMED[name]
        value = getattr(importlib.import_module(module), name)
        warnings.warn(
            f"xd.{name} is now {new}; the next release won't have the old name",
            DeprecationWarning,
            stacklevel=2,
        )
        globals()[name] = value  # once in a process
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
