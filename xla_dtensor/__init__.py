"""PyTorch's DTensor API, executed by XLA's SPMD partitioner.

Importing it installs the "xla" device and the xla mesh into torch; JAX starts on first use.
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from xla_dtensor import integration

integration.install()

from xla_dtensor.errors import (  # noqa: E402  (the device must exist first)
    DataDependentError,
    DeviceCountError,
    LayoutRuleError,
    MeshDimError,
    MeshError,
    MeshMismatchError,
    PerDeviceValueError,
    PlacementError,
    StaleStepError,
    UnsupportedOpError,
    XlaDTensorError,
)

__all__ = [
    "DFunction",
    "DataDependentError",
    "DeviceCountError",
    "DeviceMesh",
    "DistributedOp",
    "FSDPModule",
    "Layout",
    "LayoutRuleError",
    "MeshDimError",
    "MeshError",
    "MeshMismatchError",
    "MixedPrecisionPolicy",
    "PerDeviceValueError",
    "PlacementError",
    "StaleStepError",
    "UnsupportedOpError",
    "XLADeviceMesh",
    "XLAShardedTensor",
    "XLATensor",
    "XlaDTensorError",
    "axis_index",
    "collectives",
    "compile",
    "debug",
    "distribute_module",
    "distribute_tensor",
    "explain",
    "from_device_values",
    "fully_shard",
    "init_device_mesh",
    "jax_function",
    "register_rule",
    "replicate",
    "rules",
]

# Loaded on first use: these import JAX.
_LAZY = {
    "DFunction": "xla_dtensor.custom_ops",
    "DistributedOp": "xla_dtensor.custom_ops",
    "FSDPModule": "xla_dtensor.parallel",
    "Layout": "xla_dtensor.mesh.layout",
    "MixedPrecisionPolicy": "xla_dtensor.parallel",
    "XLADeviceMesh": "xla_dtensor.mesh",
    "XLAShardedTensor": "xla_dtensor.tensors.sharded_tensor",
    "XLATensor": "xla_dtensor.tensors.device_tensor",
    "axis_index": "xla_dtensor.movement.collectives",
    "compile": "xla_dtensor.compilation",
    "distribute_module": "xla_dtensor.movement.factories",
    "distribute_tensor": "xla_dtensor.movement.factories",
    "explain": "xla_dtensor.debug",
    "from_device_values": "xla_dtensor.movement.local_view",
    "fully_shard": "xla_dtensor.parallel",
    "jax_function": "xla_dtensor.custom_ops",
    "register_rule": "xla_dtensor.rules",
    "replicate": "xla_dtensor.parallel",
}
_MODULES = ("collectives", "debug", "rules")


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"xla_dtensor.{name}")
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
