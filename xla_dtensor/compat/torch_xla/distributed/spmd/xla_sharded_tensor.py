"""``XLAShardedTensor`` and ``XLAShard``: torch_xla's names for what a sharded tensor has.

Importing this gives `xla_dtensor.XLAShardedTensor` the attributes that torch_xla's class has beside
a DTensor's: ``global_tensor``, ``sharding_spec``, ``sharding_type``, ``mesh_shape``,
``partition_spec`` and ``load_local_shards_``; and its shards ``indices``, ``replica_id``,
``shard_device`` and ``unpadded_data``. They are found where nothing else has the name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_dtensor.compat.torch_xla.distributed.spmd.specs import (
    ShardingType,
    spec_text,
    to_partition_spec,
    type_of,
)
from xla_dtensor.compat.torch_xla.errors import SpmdError
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.marked_tensor import MarkedTensor
from xla_dtensor.tensors.sharded_tensor import LocalShard, XLAShardedTensor

XLAShard = LocalShard

__all__ = ["XLAShard", "XLAShardedTensor"]


def _load_local_shards(tensor: Any, shards: Sequence[Any]) -> None:
    """Write what each device is to hold into a sharded tensor, in place.

    Raises:
        SpmdError: the tensor is whole on every device, or these aren't its shards, one of each
            device and each of its shape.
    """
    own = tensor.local_shards
    what = f"load_local_shards_ into a tensor of shape {list(tensor.shape)}"
    if type_of(tensor) is ShardingType.REPLICATED:
        raise SpmdError(f"{what}, which is whole on every device: write to it, t.copy_(value)")
    given = {shard.device: shard.data for shard in shards}
    if set(given) != {shard.device for shard in own}:
        raise SpmdError(
            f"{what}: got shards of the devices {sorted(given)}, and need one of each of "
            f"{[shard.device for shard in own]}"
        )
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for shard in own:
        data = given[shard.device]
        if data.shape != shard.data.shape:
            raise SpmdError(
                f"{what}: device {shard.device} holds a shard of shape {list(shard.data.shape)}, "
                f"and gets one of {list(data.shape)}"
            )
        whole[shard.index] = data
    with torch.no_grad():
        tensor.copy_(whole)


_OF_SHARDED: dict[str, Callable[[Any], Any]] = {
    "global_tensor": lambda tensor: tensor,
    "load_local_shards_": lambda tensor: lambda shards: _load_local_shards(tensor, shards),
    "mesh_shape": lambda tensor: tuple(tensor.device_mesh.shape),
    "partition_spec": to_partition_spec,
    "sharding_spec": spec_text,
    "sharding_type": type_of,
}

_OF_PER_DEVICE: dict[str, Callable[[Any], Any]] = {
    "global_tensor": lambda tensor: tensor,
    "sharding_spec": lambda tensor: "{manual}" if tensor.varying else "",
    "sharding_type": lambda tensor: ShardingType.MANUAL if tensor.varying else None,
}

_OF_SHARD: dict[str, Callable[[Any], Any]] = {
    # torch_xla has a list, or an ellipsis of all there is; this indexes the same.
    "indices": lambda shard: tuple(slice(s.start, s.stop, 1) for s in shard.index),
    "replica_id": lambda shard: shard.replica,
    "shard_device": lambda shard: f"xla:{shard.device}",
    "unpadded_data": lambda shard: shard.data,  # shards aren't padded
}


def _finder(
    found: dict[str, Callable[[Any], Any]], before: Callable[[Any, str], Any] | None
) -> Callable[[Any, str], Any]:
    def find(self: Any, name: str) -> Any:
        if name in found:
            return found[name](self)
        if before is not None:
            return before(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    return find


for _class, _names in (
    (XLAShardedTensor, _OF_SHARDED),
    (MarkedTensor, _OF_SHARDED),
    (XLATensor, _OF_PER_DEVICE),
    (LocalShard, _OF_SHARD),
):
    _finds = _finder(_names, getattr(_class, "__getattr__", None))
    _class.__getattr__ = _finds  # type: ignore[union-attr]
