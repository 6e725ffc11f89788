"""Batches as sharded tensors: from any loader, or from each process's part of a batch."""

from xla_dtensor.data.batches import shard_batch
from xla_dtensor.data.device_loader import DeviceLoader, device_loader
from xla_dtensor.data.loader import ShardedLoader

__all__ = ["DeviceLoader", "ShardedLoader", "device_loader", "shard_batch"]
