"""`XLAShardedTensor`, under the name that the design gives its module."""

from xla_dtensor.tensors.sharded_tensor import LocalShard, XLAShardedTensor

__all__ = ["LocalShard", "XLAShardedTensor"]
