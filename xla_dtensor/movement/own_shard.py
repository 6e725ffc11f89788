"""Uneven shards: ``to_local`` in a process with one device gives its own shard, unpadded.

Such a process has one shard, so its local tensor has a shape. A process with several devices has
shards of several shapes, which are no one tensor.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base import executor
from xla_dtensor.errors import PlacementError
from xla_dtensor.forms.form import Form, device_form
from xla_dtensor.forms.read import read
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh import frame_of, mesh_dim_axes
from xla_dtensor.runtime import arrays
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

_NO_WRITES = (
    "a write to what this process holds of an unevenly sharded tensor would not reach that tensor: "
    "write to a copy (x.to_local().clone()), and make a tensor of it (DTensor.from_local(local, "
    "mesh, placements, shape=x.shape, stride=x.stride()))"
)


def has_own_piece(form: Form) -> bool:
    """Whether a sharded form has a dim that doesn't divide, and this process one of its pieces."""
    frame = form.frame
    if frame is None or not frame.one_each or form.varying or form.unreduced:
        return False
    if not executor.current().has_values or form.meta:
        return False
    return any(
        size % math.prod(frame.sizes[name] for name in names)
        for size, names in zip(form.shape, form.dim_axes, strict=True)
    )


def own_piece(tensor: XLAShardedTensor) -> XLATensor:
    """What this process's device holds; below autograd. It shares no memory with the tensor, and
    refuses writes."""
    array = read(tensor)
    (shard,) = array.addressable_shards
    index = _inside(shard.index, tensor._form.shape)
    piece = tuple(part.stop - part.start for part in index)
    with jax.enable_x64(True):
        value = arrays.own_shard(array)[tuple(slice(0, n) for n in piece)]
    form = device_form(None, piece, dtype=tensor.dtype)
    storage = Storage(value, form)
    storage.refuses_writes = _NO_WRITES
    return XLATensor(storage, form)


def of_own_pieces(local: Any, form: Form) -> XLAShardedTensor:
    """The tensor in ``form`` that the processes' pieces make up; below autograd.

    Raises:
        PlacementError: this process's piece hasn't the shape that it has in ``form``.
    """
    assert form.frame is not None
    sharding = form.sharding
    (device,) = sharding.addressable_devices
    index = sharding.addressable_devices_indices_map(form.padded_shape)[device]
    wanted = tuple(part.stop - part.start for part in _inside(index, form.shape))
    if tuple(local.shape) != wanted:
        raise PlacementError(
            f"from_local(shape={list(form.shape)}, placements={list(form.placements or ())}) on "
            f"{form.mesh!r}: this process holds {list(wanted)} of it, the local tensor is "
            f"{list(local.shape)}"
        )
    value = np.zeros(sharding.shard_shape(form.padded_shape), form.jax_dtype)
    value[tuple(slice(0, n) for n in wanted)] = arrays.get(read(local))
    with jax.enable_x64(True):
        array = arrays.put_each(form.padded_shape, sharding, {device: value})
    return XLAShardedTensor(Storage(array, form), form)


def are_equal_along(tensor: Any, mesh: DeviceMesh, dim: int) -> bool:
    """Whether the devices along a mesh dim have the same value of a per-device tensor that varies
    along it; False where a process can't tell, since it drives several or traces a step.

    What a process has of its own varies when it has met what others have, also if it is the same in
    all: a parameter, and its gradient.
    """
    frame = frame_of(mesh)
    if not frame.one_each or not executor.current().has_values or tensor.is_meta:
        return False
    value = arrays.get(arrays.own_shard(read(tensor)))
    sums = arrays.checksums(value)
    owners = np.vectorize(lambda device: device.process_index, otypes=[int])
    placed = np.array(sums)[owners(frame.jax_mesh.devices)]
    names = [axis.name for axis in frame.axes]
    along = tuple(names.index(name) for name in mesh_dim_axes(mesh)[dim])
    return bool((placed == placed.max(axis=along, keepdims=True)).all())


def _inside(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[slice]:
    """The part of a padded array's index that is within ``shape``."""
    found = []
    for part, size in zip(index, shape, strict=True):
        start, stop, _ = part.indices(max(size, part.stop or 0))
        found.append(slice(min(start, size), min(stop, size)))
    return found
