"""Each device's values of a tensor, copied to the host; and tensors made of such values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base import assertions, executor
from xla_dtensor.base.torch_private.attributes import device_numbers_of_layout
from xla_dtensor.errors import MeshDimError
from xla_dtensor.forms.form import Form, device_form
from xla_dtensor.forms.host_values import fetch, from_numpy, to_devices, to_numpy
from xla_dtensor.forms.per_device import union
from xla_dtensor.forms.pieces import pieces
from xla_dtensor.forms.read import reading
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh import frame_of, mesh_dim_axes
from xla_dtensor.movement.relayout import same_value
from xla_dtensor.runtime import arrays, processes
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.of_form import new_tensor
from xla_dtensor.tensors.sharded_tensor import LocalShard, XLAShardedTensor


def from_device_values(
    values: Sequence[torch.Tensor], device_mesh: DeviceMesh, vary: Sequence[str] | None = None
) -> XLATensor:
    """A per-device tensor from each device's value.

    Args:
        values: CPU tensors of one shape and dtype, one per device of the mesh, in row-major order;
            of several processes, each gives those of its own devices.
        device_mesh: the devices, an xla mesh.
        vary: the names of the mesh dims along which they differ; all by default. Along the others
            the values at coordinate 0 are taken.

    Returns:
        a tensor of that shape and dtype, which varies along ``vary``; without a history.

    Raises:
        ValueError: not as many values as devices, or of several shapes or dtypes.
        MeshDimError: ``vary`` names a dim that the mesh doesn't have.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        batch = xd.from_device_values([torch.full((4, 16), float(i)) for i in range(8)], mesh)
        assert batch.shape == (4, 16) and batch.varying == ("dp",)
        assert (batch * 2).local_values()[3].unique().tolist() == [6]
    """
    frame = frame_of(device_mesh)
    own = own_positions(device_mesh)
    if len(values) != len(own) or len({(v.shape, v.dtype) for v in values}) != 1:
        whose = f", {len(own)} of them this process's," if processes.several() else ""
        raise ValueError(
            f"from_device_values: {device_mesh!r}{whose} needs {len(own)} tensors of one shape "
            f"and dtype, got {[(list(v.shape), v.dtype) for v in values]}"
        )
    names = device_mesh.mesh_dim_names or ()
    unknown = [name for name in vary or () if name not in names]
    if unknown:
        raise MeshDimError(
            f"from_device_values(vary={list(vary or ())}): {device_mesh!r} has no mesh dim "
            f"{', '.join(map(repr, unknown))}; it has {', '.join(map(repr, names)) or 'no names'}"
        )
    dims = range(device_mesh.ndim) if vary is None else [names.index(name) for name in vary]
    axes = mesh_dim_axes(device_mesh)
    order = [name for dim in sorted(dims) for name in axes[dim]]
    varying = union(frame, [tuple(order)])
    shape = tuple(values[0].shape)
    form = device_form(frame, shape, dtype=values[0].dtype, varying=varying)
    if processes.several():
        position_of = _positions(device_mesh)
        hosts = dict(zip(own, map(to_numpy, values), strict=True))
        by_number = {number: hosts[position_of[number]] for number in frame.own_ids}
        return XLATensor(Storage(_of_own_devices(by_number, form), form), form)
    stacked = torch.stack(list(values)).reshape(*device_mesh.shape, *values[0].shape)
    for dim in reversed(range(device_mesh.ndim)):
        if dim not in dims:
            stacked = stacked.select(dim, 0)
    sizes = [frame.sizes[name] for name in order]
    stacked = stacked.reshape(*sizes, *values[0].shape)
    lead = [order.index(name) for name in varying]
    stacked = stacked.permute(*lead, *range(len(order), stacked.ndim)).contiguous()
    return XLATensor(Storage(to_devices(stacked, form), form), form)


def from_host(value: torch.Tensor, form: Form) -> Any:
    """A tensor of ``form``, which has no reductions pending.

    Args:
        value: on the CPU; the varying axes, then the tensor's dims.
    """
    array = to_numpy(value)
    lead = len(form.varying)
    pads = [(0, p - n) for p, n in zip(form.padded_shape, form.shape, strict=True)]
    array = np.pad(array, [(0, 0)] * lead + pads)
    with jax.enable_x64(True):
        return new_tensor(arrays.put(array, form.sharding), form)


def _of_own_devices(by_number: dict[int, np.ndarray], form: Form) -> Any:
    """An array in ``form``, from what each of this process's devices has of it."""
    assert form.frame is not None
    numbers = np.array(form.frame.device_ids).reshape(form.frame.jax_mesh.devices.shape)
    devices = form.frame.jax_mesh.devices
    lead = (1,) * len(form.varying)
    shards = {
        devices[place]: by_number[number].reshape(lead + form.shape)
        for place, number in np.ndenumerate(numbers)
        if number in by_number
    }
    with jax.enable_x64(True):
        return arrays.put_each(form.array_shape, form.sharding, shards)


def own_positions(mesh: DeviceMesh) -> list[int]:
    """Which devices of the mesh are this process's: their row-major positions. A submesh stands for
    several lists of devices; the process's devices may be in one or in many of them."""
    if not processes.several():
        return list(range(mesh.size()))
    position_of = _positions(mesh)
    return sorted({position_of[number] for number in frame_of(mesh).own_ids})


def _positions(mesh: DeviceMesh) -> dict[int, int]:
    """The position in the mesh of each device of its root."""
    lists = device_numbers_of_layout(mesh).reshape(-1, mesh.size()).tolist()
    return {number: i for numbers in lists for i, number in enumerate(numbers)}


def local_values(tensor: XLATensor) -> list[torch.Tensor]:
    """`XLATensor.local_values`."""
    executor.current().refuse("local_values()")
    assertions.look()
    form = tensor._form
    with reading(tensor) as array:
        if form.frame is None:
            return [from_numpy(arrays.get(array))]
        return [
            from_numpy(arrays.get(shard.data).reshape(form.shape)) for _, shard in _own(array, form)
        ]


def _own(array: Any, form: Form) -> list[tuple[int, Any]]:
    """The number and the shard of each of this process's devices, in the frame's order."""
    assert form.frame is not None
    by_device = {shard.device: shard for shard in array.addressable_shards}
    devices = form.frame.jax_mesh.devices.flat
    numbered = zip(form.frame.device_ids, devices, strict=True)
    return [(number, by_device[device]) for number, device in numbered if device in by_device]


def local_shards(tensor: XLAShardedTensor) -> list[LocalShard]:
    """`XLAShardedTensor.local_shards`."""
    executor.current().refuse("local_shards")
    assertions.look()
    with reading(tensor) as array:
        return _shards(array, tensor._form)


def _shards(array: Any, form: Form) -> list[LocalShard]:
    if form.unreduced:
        with jax.enable_x64(True):
            (array,) = same_value(form, form.reduced()).eager(None, [array], [])
        form = form.reduced()
    own = dict(_own(array, form))
    everywhere = list(pieces(form))
    # Decided by the pieces of all devices: a fetch is collective, so all processes must agree.
    is_cut_alike = all(piece.is_block for piece in everywhere)
    whole = None if is_cut_alike else fetch(array, array.shape)
    found = [piece for piece in everywhere if piece.number in own]
    shards = []
    for piece in found:
        number, index, lead = piece.number, piece.index, piece.lead
        if whole is None:
            at: tuple[Any, ...] = tuple(slice(0, part.stop - part.start) for part in index)
            data = np.asarray(own[number].data)[(0,) * len(lead)][at]
        else:
            at = (*lead, *index)
            data = whole[at]
        shards.append(LocalShard(number, index, from_numpy(data)))
    return shards
