"""Partition specs, torch_xla's notation of a layout: for each tensor dim its mesh axes.

And how XLA writes a sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.compat.torch_xla.errors import SpmdError
from xla_dtensor.mesh import dim_mesh_dims, placements_of

PartitionSpec = Sequence[Any]
Orders = tuple[tuple[int, ...], ...]


class ShardingType(IntEnum):
    """The kinds of XLA's shardings, with its numbers."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


def orders_of(mesh: DeviceMesh, partition_spec: PartitionSpec) -> Orders:
    """Per tensor dim the numbers of the mesh axes that shard it, major first.

    Raises:
        SpmdError: an axis doesn't exist, or is used twice.
    """
    spec = tuple(partition_spec)
    names = mesh.mesh_dim_names or ()
    orders: list[tuple[int, ...]] = []
    used: set[int] = set()
    for entry in spec:
        order = []
        for axis in entry if isinstance(entry, tuple | list) else (entry,):
            if axis is None:
                continue
            if isinstance(axis, str):
                if axis not in names:
                    raise SpmdError(
                        f"Axis name {axis} is not defined in the given mesh {mesh!r}: partition "
                        f"spec {spec}"
                    )
                axis = names.index(axis)
            if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
                raise SpmdError(
                    f"Spec type {type(axis)} is not supported in partition spec {spec}: an axis is "
                    "a number, a name or None, several are a tuple"
                )
            if not 0 <= axis < mesh.ndim:
                raise SpmdError(
                    f"partition spec {spec}: {mesh!r} has the axes 0 to {mesh.ndim - 1}, "
                    f"and no {axis}"
                )
            if axis in used:
                raise SpmdError(
                    f"partition spec {spec}: axis {axis} of {mesh!r} can shard one dim, once"
                )
            used.add(int(axis))
            order.append(int(axis))
        orders.append(tuple(order))
    return tuple(orders)


def to_placements(
    mesh: DeviceMesh, partition_spec: PartitionSpec, ndim: int
) -> tuple[Placement, ...]:
    """The placements that a partition spec means.

    Raises:
        SpmdError: it doesn't fit the mesh, or hasn't an entry for each of ``ndim`` dims.
    """
    if len(partition_spec) != ndim:
        raise SpmdError(
            f"Partition spec length ({len(partition_spec)}) should be equal to the input rank "
            f"({ndim}): {tuple(partition_spec)}"
        )
    return placements_of(orders_of(mesh, partition_spec), tuple(mesh.shape))


def to_partition_spec(tensor: Any) -> tuple[Any, ...]:
    """The partition spec that a sharded tensor's placements are, by numbers of axes."""
    orders = _orders(tensor)
    return tuple(None if not o else o[0] if len(o) == 1 else o for o in orders)


def _orders(tensor: Any) -> Orders:
    return dim_mesh_dims(tensor.placements, tuple(tensor.device_mesh.shape), tensor.ndim)


def sharding_text(mesh: DeviceMesh, orders: Orders) -> str:
    """How XLA writes a sharding: the number of pieces per dim, and the devices that have them, in
    their order."""
    devices = mesh.mesh.numpy()
    sizes = mesh.mesh.shape
    pieces = [int(np.prod([sizes[axis] for axis in order], dtype=int)) for order in orders]
    if all(count == 1 for count in pieces):
        return "{replicated}"
    sharded = [axis for order in orders for axis in order]
    rest = [axis for axis in range(mesh.ndim) if axis not in sharded]
    numbers = ",".join(map(str, devices.transpose([*sharded, *rest]).reshape(-1).tolist()))
    copies = int(np.prod([sizes[axis] for axis in rest], dtype=int))
    if copies == 1:
        return f"{{devices=[{','.join(map(str, pieces))}]{numbers}}}"
    dims = ",".join(map(str, [*pieces, copies]))
    return f"{{devices=[{dims}]{numbers} last_tile_dim_replicate}}"


def spec_text(tensor: Any) -> str:
    """`sharding_text` of a sharded tensor."""
    return sharding_text(tensor.device_mesh, _orders(tensor))


def type_of(tensor: Any) -> ShardingType:
    """The kind of a sharded tensor's sharding."""
    text = spec_text(tensor)
    if text == "{replicated}":
        return ShardingType.REPLICATED
    return ShardingType.PARTIAL if "last_tile_dim_replicate" in text else ShardingType.TILED
