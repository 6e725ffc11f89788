"""HyperParallel's names: ``from xla_dtensor.compat.hyper_parallel import DFunction, Layout, ...``.

Custom functions, layouts and plans. Importing it gives ``x.layout`` the names that HyperParallel's
layouts have (``mesh_shape``, ``alias_name``, ``repeat_num()`` and others).
"""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from xla_dtensor.compat.hyper_parallel.layout import Layout
from xla_dtensor.compat.hyper_parallel.mesh import distribute_tensor, init_device_mesh
from xla_dtensor.compat.hyper_parallel.names import build_layout as _build_layout
from xla_dtensor.compat.hyper_parallel.ops import DistributedOp, get_distributed_op
from xla_dtensor.compat.hyper_parallel.plan import ShardingPlan, shard_module
from xla_dtensor.compat.hyper_parallel.tensor_maps import StridedShard
from xla_dtensor.custom_ops import DFunction
from xla_dtensor.mesh import get_mesh as get_current_mesh
from xla_dtensor.movement.factories import distribute_module

__all__ = [
    "DFunction",
    "DTensor",
    "DeviceMesh",
    "DistributedOp",
    "Layout",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "ShardingPlan",
    "StridedShard",
    "_build_layout",
    "distribute_module",
    "distribute_tensor",
    "get_current_mesh",
    "get_distributed_op",
    "init_device_mesh",
    "shard_module",
]


def __getattr__(name: str) -> object:
    refused = {
        "RaggedShard": "shards of several sizes are torch.chunk's alone (uneven ones); pad the "
        "tensor, or give each group of experts a parameter of its own",
        "SkipDTensorDispatch": "optimizers take sharded tensors as they are: leave it out",
        "HSDPCell": "use xla_dtensor.fully_shard",
        "hsdp": "use xla_dtensor.fully_shard(module, mesh=mesh['replicate', 'shard'])",
        "PipelineStage": "use xla_dtensor.pipeline.PipelineStage, with torch's schedules",
    }
    if name in refused:
        raise ImportError(f"{name} has no counterpart: {refused[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
