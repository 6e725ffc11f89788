"""Custom differentiable ops on sharded tensors: `DFunction`, `DistributedOp`, `jax_function`.

README.md here explains how the two work together.
"""

from xla_dtensor.custom_ops.distributed_op import CacheInfo, DistributedOp
from xla_dtensor.custom_ops.functions import DFunction
from xla_dtensor.custom_ops.jax_function import jax_function

__all__ = ["CacheInfo", "DFunction", "DistributedOp", "jax_function"]
