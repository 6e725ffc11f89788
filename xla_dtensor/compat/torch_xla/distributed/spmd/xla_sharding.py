"""The names of ``torch_xla.distributed.spmd.xla_sharding``; ``README.md`` says where they are."""

from xla_dtensor.compat.torch_xla.distributed.spmd.linear import (
    EinsumLinear,
    XLAPatchedLinear,
    apply_backward_optimization_barrier,
    apply_xla_patch_to_nn_linear,
    xla_patched_nn_linear_forward,
)
from xla_dtensor.compat.torch_xla.distributed.spmd.manual import (
    disable_manual_sharding,
    enable_manual_sharding,
)
from xla_dtensor.compat.torch_xla.distributed.spmd.marking import (
    ShardingSpec,
    clear_sharding,
    mark_sharding,
    mark_sharding_with_gradients,
    shard_as,
    unwrap_sharded_tensor,
    wrap_as_sharded_tensor,
    wrap_if_sharded,
)
from xla_dtensor.compat.torch_xla.distributed.spmd.meshes import (
    HybridMesh,
    Mesh,
    get_1d_mesh,
    get_global_mesh,
    set_global_mesh,
)
from xla_dtensor.compat.torch_xla.distributed.spmd.specs import ShardingType
from xla_dtensor.compat.torch_xla.distributed.spmd.xla_sharded_tensor import (
    XLAShard,
    XLAShardedTensor,
)

annotate_custom_sharding = mark_sharding

__all__ = [
    "EinsumLinear",
    "HybridMesh",
    "Mesh",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_patched_nn_linear_forward",
]
