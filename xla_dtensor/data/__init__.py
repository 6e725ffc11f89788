"""Batches of the host on the devices of a mesh."""

from xla_dtensor.data.batches import shard_batch
from xla_dtensor.data.loader import ShardedLoader

__all__ = ["ShardedLoader", "shard_batch"]
