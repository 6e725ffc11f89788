"""What programs use of torch_xla's C++ module: how a tensor is sharded, and manual sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xla_dtensor.compat.torch_xla.distributed.spmd.manual import (
    full_to_shard_shape,
    shard_to_full_shape,
)
from xla_dtensor.compat.torch_xla.distributed.spmd.meshes import OpSharding
from xla_dtensor.compat.torch_xla.distributed.spmd.specs import (
    ShardingType,
    spec_text,
    to_placements,
    type_of,
)
from xla_dtensor.compat.torch_xla.errors import SpmdError
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.mesh import dim_mesh_dims
from xla_dtensor.movement.factories import distribute_tensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

_spmd_full_to_shard_shape = full_to_shard_shape
_spmd_shard_to_full_shape = shard_to_full_shape


def _get_xla_sharding_spec(tensor: Any) -> str:
    """How XLA writes the tensor's sharding; "" if it has none."""
    return spec_text(tensor) if isinstance(tensor, XLAShardedTensor) else ""


def _get_xla_sharding_specs(tensors: Sequence[Any]) -> list[str]:
    return [_get_xla_sharding_spec(tensor) for tensor in tensors]


def _get_xla_sharding_type(tensor: Any) -> ShardingType | None:
    """The kind of the tensor's sharding; None if it has none."""
    return type_of(tensor) if isinstance(tensor, XLAShardedTensor) else None


def _global_tensor_from_cpu_shards(
    shards: Sequence[torch.Tensor], sharding: OpSharding, global_shape: Sequence[int] | None = None
) -> Any:
    """The sharded tensor of which each device holds one of these, in the order of the devices.

    Args:
        shards: of one shape; what is over at the end of a dim is padding.
        sharding: ``mesh.get_op_sharding(partition_spec)``.
        global_shape: by default what the shards make up without padding.

    Raises:
        SpmdError: not one per device, or a shape that they can't make up.
    """
    mesh = sharding.mesh
    first = shards[0]
    if len(shards) != mesh.size() or any(shard.shape != first.shape for shard in shards):
        raise SpmdError(
            f"from shards of shapes {[list(shard.shape) for shard in shards]}: {mesh!r} needs "
            f"{mesh.size()} of one shape"
        )
    spec = tuple(sharding.partition_spec)
    spec = spec[: first.ndim] if all(axis is None for axis in spec) else spec
    placements = to_placements(mesh, spec, first.ndim)
    orders = dim_mesh_dims(placements, tuple(mesh.shape), first.ndim)
    sizes = mesh.mesh.shape
    pieces = [int(torch.tensor([sizes[axis] for axis in order]).prod()) for order in orders]
    most = [size * count for size, count in zip(first.shape, pieces, strict=True)]
    shape = most if global_shape is None else list(global_shape)
    fits = len(shape) == len(most) and all(
        -(-size // count) == own
        for size, count, own in zip(shape, pieces, first.shape, strict=False)
    )
    if not fits:
        raise SpmdError(
            f"shards of shape {list(first.shape)}, {pieces} of them per dim, don't make up a "
            f"tensor of shape {shape}"
        )
    whole = torch.empty(most, dtype=first.dtype)
    coordinates = {int(n): at for at, n in _numbered(mesh.mesh)}
    for number, shard in enumerate(shards):
        at = coordinates[number]
        index = []
        for order, size in zip(orders, first.shape, strict=True):
            position = 0
            for axis in order:
                position = position * sizes[axis] + at[axis]
            index.append(slice(position * size, (position + 1) * size))
        whole[tuple(index)] = shard
    value = whole[tuple(slice(0, size) for size in shape)].contiguous()
    return distribute_tensor(value, mesh, placements)


def _numbered(devices: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    return [
        (tuple(at), devices[tuple(at)])
        for at in torch.cartesian_prod(*map(torch.arange, devices.shape))
        .reshape(-1, devices.ndim)
        .tolist()
    ]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnsupportedOpError(
        f"torch_xla._XLAC.{name}: torch_xla's C++ module isn't there. The program of a step is "
        "step.compiled_programs()[-1].as_text(), the layout of a tensor x.placements"
    )
