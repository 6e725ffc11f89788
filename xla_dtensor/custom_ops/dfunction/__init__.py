"""Custom differentiable ops on sharded tensors: `DFunction` and its layout rule, `DistributedOp`.

README.md here explains how the two work together.
"""

from xla_dtensor.custom_ops.dfunction._function import DFunction
from xla_dtensor.custom_ops.dfunction._op import CacheInfo, DistributedOp

__all__ = ["CacheInfo", "DFunction", "DistributedOp"]
