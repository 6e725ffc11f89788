"""PyTorch's DTensor API, executed by XLA's SPMD partitioner.

Importing it installs the "xla" device and the xla mesh into torch; JAX starts on first use.
"""

import sys
import types
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from xla_dtensor import integration
from xla_dtensor.base.config import config
from xla_dtensor.version import VERSION as __version__  # noqa: F401

integration.install()

from xla_dtensor.errors import (  # noqa: E402  (the device must exist first)
    CheckpointError,
    DataDependentError,
    DeviceCountError,
    DistributedError,
    DivergenceError,
    LayoutRuleError,
    MeshDimError,
    MeshError,
    MeshMismatchError,
    PerDeviceValueError,
    PipelineError,
    PlacementError,
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
    "Explanation": "xla_dtensor.debug",
    "FSDPModule": "xla_dtensor.parallel",
    "Layout": "xla_dtensor.mesh.layout",
    "MixedPrecisionPolicy": "xla_dtensor.parallel",
    "OffloadPolicy": "xla_dtensor.parallel",
    "Partial": "torch.distributed.tensor.placement_types",
    "PipelineSchedule": "xla_dtensor.pipeline",
    "PipelineStage": "xla_dtensor.pipeline",
    "ReplayedStep": "xla_dtensor.compilation",
    "Replicate": "torch.distributed.tensor.placement_types",
    "ReplicateModule": "xla_dtensor.parallel",
    "Shard": "torch.distributed.tensor.placement_types",
    "ShardedLoader": "xla_dtensor.data",
    "XLADeviceMesh": "xla_dtensor.mesh",
    "XLAShardedTensor": "xla_dtensor.tensors.sharded_tensor",
    "XLATensor": "xla_dtensor.tensors.device_tensor",
    "abstract": "xla_dtensor.plan",
    "axis_index": "xla_dtensor.movement.collectives",
    "check_indices": "xla_dtensor.base.assertions",
    "compile": "xla_dtensor.compilation",
    "distribute_module": "xla_dtensor.movement.factories",
    "distribute_tensor": "xla_dtensor.movement.factories",
    "explain": "xla_dtensor.debug",
    "from_device_values": "xla_dtensor.movement.device_values",
    "from_jax": "xla_dtensor.movement.jax_arrays",
    "fully_shard": "xla_dtensor.parallel",
    "get_mesh": "xla_dtensor.mesh",
    "jax_function": "xla_dtensor.custom_ops",
    "offload_state": "xla_dtensor.parallel",
    "parallelize": "xla_dtensor.parallel",
    "plan": "xla_dtensor.plan",
    "register_rule": "xla_dtensor.rules",
    "replicate": "xla_dtensor.parallel",
    "scan_equal_layers": "xla_dtensor.compilation",
    "scan_layers": "xla_dtensor.compilation",
    "set_mesh": "xla_dtensor.mesh",
    "shard_batch": "xla_dtensor.data",
    "shard_by_size": "xla_dtensor.parallel",
    "stage_meshes": "xla_dtensor.pipeline",
    "to_jax": "xla_dtensor.movement.jax_arrays",
    "zero": "xla_dtensor.parallel",
}
_MODULES = {
    "checkpoint": "xla_dtensor.checkpoint",
    "collectives": "xla_dtensor.movement.collectives",
    "data": "xla_dtensor.data",
    "debug": "xla_dtensor.debug",
    "distributed": "xla_dtensor.runtime.distributed",
    "rules": "xla_dtensor.rules",
}

__all__ = [
    "Buckets",
    "CheckpointError",
    "CompiledStep",
    "DFunction",
    "DataDependentError",
    "DeviceCountError",
    "DeviceMesh",
    "DistributedError",
    "DistributedOp",
    "DivergenceError",
    "Explanation",
    "FSDPModule",
    "Layout",
    "LayoutRuleError",
    "MeshDimError",
    "MeshError",
    "MeshMismatchError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Partial",
    "PerDeviceValueError",
    "PipelineError",
    "PipelineSchedule",
    "PipelineStage",
    "PlacementError",
    "ReplayedStep",
    "Replicate",
    "ReplicateModule",
    "Shard",
    "ShardedLoader",
    "StaleStepError",
    "TopologyError",
    "UnsupportedOpError",
    "XLADeviceMesh",
    "XLAShardedTensor",
    "XLATensor",
    "XlaDTensorError",
    "abstract",
    "axis_index",
    "check_indices",
    "checkpoint",
    "collectives",
    "compile",
    "config",
    "data",
    "debug",
    "distribute_module",
    "distribute_tensor",
    "distributed",
    "explain",
    "from_device_values",
    "from_jax",
    "fully_shard",
    "get_mesh",
    "init_device_mesh",
    "jax_function",
    "offload_state",
    "parallelize",
    "plan",
    "register_rule",
    "replicate",
    "rules",
    "scan_equal_layers",
    "scan_layers",
    "set_mesh",
    "shard_batch",
    "shard_by_size",
    "stage_meshes",
    "to_jax",
    "zero",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


class _Package(types.ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # A function and its folder have one name; Python would put the folder here.
        if name != "plan" or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
