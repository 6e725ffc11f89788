"""Custom ops on sharded tensors, under the name that the design gives their module."""

from xla_dtensor.custom_ops import CacheInfo, DFunction, DistributedOp

__all__ = ["CacheInfo", "DFunction", "DistributedOp"]
