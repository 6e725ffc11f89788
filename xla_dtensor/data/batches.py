"""Sharded batches of which each process has loaded its part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base import executor
from xla_dtensor.errors import PlacementError, UnsupportedOpError
from xla_dtensor.forms.form import Form, sharded_form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh import Frame, normalize_placements
from xla_dtensor.movement.factories import distribute_tensor
from xla_dtensor.runtime import agreement, arrays, processes
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor


def shard_batch(
    local_batch: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]
) -> XLAShardedTensor:
    """A sharded tensor of which each process has loaded its part.

    The parts follow each other in the order of the processes along the tensor dims that
    ``placements`` shard over mesh dims which go across processes. Processes whose devices hold the
    same rows have to give the same. In a process that is alone it is ``distribute_tensor``.

    Args:
        local_batch: a CPU tensor, this process's part: of the same shape in all processes.
        device_mesh: an xla mesh.
        placements: one per mesh dim, ``Shard`` or ``Replicate``.

    Returns:
        a tensor with the rows of all processes.

    Raises:
        PlacementError: a dim of the part doesn't divide by the number of this process's devices
            that split it, or a process's devices hold rows that aren't next to each other.
        DivergenceError: the parts have different shapes.
        UnsupportedOpError: in a compiled step, with a ``Partial`` placement, or of a tensor that
            isn't on the CPU.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        rows = 8 // xd.distributed.process_count()  # what this process has loaded
        batch = xd.data.shard_batch(torch.ones(rows, 16), mesh, [xd.Shard(0), xd.Replicate()])
        assert batch.shape == (8, 16)
    """
    executor.current().not_in_step(
        "shard_batch in a compiled step: the batch would be a constant of the program; make it "
        "before the step, and give it as an argument"
    )
    placed = normalize_placements(placements, device_mesh, local_batch.ndim, "shard_batch")
    if any(placement.is_partial() for placement in placed):
        raise UnsupportedOpError(
            f"shard_batch with placements {list(placed)} on {device_mesh!r}: give Shard or "
            "Replicate; DTensor.from_local takes parts of a sum"
        )
    if local_batch.device.type != "cpu":
        raise UnsupportedOpError(
            f"shard_batch of a tensor on {local_batch.device}: give it the CPU's, or "
            "DTensor.from_local the device's"
        )
    if not processes.several():
        return distribute_tensor(local_batch, device_mesh, placed)
    agreement.agree(
        f"shards a batch of which it has {list(local_batch.shape)}, {local_batch.dtype}, as "
        f"{list(placed)} on {device_mesh!r}",
        "Each process has to have a part of the same shape; leave out the last batch of a loader "
        "if it is smaller (drop_last=True)",
    )
    local_shape = tuple(local_batch.shape)
    form = sharded_form(device_mesh, placed, local_shape, dtype=local_batch.dtype)
    own = [_own_pieces(form, d) for d in range(len(local_shape))]
    shape = tuple(
        size * shards // len(pieces)
        for size, (pieces, shards) in zip(local_shape, own, strict=True)
    )
    form = sharded_form(device_mesh, placed, shape, dtype=local_batch.dtype)
    value = to_numpy(local_batch)
    first = [pieces[0] for pieces, _ in own]

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        """Of the whole batch, as elements of this process's part."""
        moved = []
        for part, size, start, (pieces, _) in zip(index, local_shape, first, own, strict=True):
            before = start * (size // len(pieces))
            stop = size if part.stop is None else part.stop - before
            moved.append(slice((part.start or 0) - before, stop))
        return value[tuple(moved)]

    with jax.enable_x64(True):
        array = arrays.put_shards(shape, form.sharding, shard)
    return XLAShardedTensor(Storage(array, form), form)


def _own_pieces(form: Form, dim: int) -> tuple[list[int], int]:
    """Which of the pieces of a tensor dim this process's devices hold, and of how many.

    Raises:
        PlacementError: they aren't next to each other, or the process's part doesn't divide.
    """
    frame, names = form.frame, form.dim_axes[dim]
    assert frame is not None
    shards = math.prod(frame.sizes[name] for name in names)
    pieces = sorted(set(_places(frame, names)))
    if pieces != list(range(pieces[0], pieces[-1] + 1)):
        raise PlacementError(
            f"shard_batch with placements {list(form.placements or ())} on {form.mesh!r}: the "
            f"devices of process {processes.index()} hold the pieces {pieces} of {shards} of dim "
            f"{dim}, which aren't next to each other; shard over mesh dims in their order, or "
            "distribute_tensor the whole batch"
        )
    if form.shape[dim] % len(pieces):
        raise PlacementError(
            f"shard_batch with placements {list(form.placements or ())} on {form.mesh!r}: process "
            f"{processes.index()} has {form.shape[dim]} of dim {dim}, which doesn't divide by its "
            f"{len(pieces)} devices along it"
        )
    return pieces, shards


def _places(frame: Frame, names: tuple[str, ...]) -> list[int]:
    """The position along axes, major to minor, of each of this process's devices."""
    ordered = [axis.name for axis in frame.axes]
    coordinates = itertools.product(*(range(frame.sizes[name]) for name in ordered))
    found: list[int] = []
    for number, coordinate in zip(frame.device_ids, coordinates, strict=True):
        if number in frame.own_ids:
            place: Any = 0
            for name in names:
                place = place * frame.sizes[name] + coordinate[ordered.index(name)]
            found.append(place)
    return found
