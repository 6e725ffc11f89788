"""What each device holds, on the host; and tensors made of such values."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base import assertions, thread_state
from xla_dtensor.errors import MeshDimError
from xla_dtensor.forms.form import device_form
from xla_dtensor.forms.host_values import from_numpy, to_devices
from xla_dtensor.forms.per_device import union
from xla_dtensor.forms.read import read
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh import frame_of, mesh_dim_axes
from xla_dtensor.movement.relayout import same_value
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.sharded_tensor import LocalShard, XLAShardedTensor


def from_device_values(
    values: Sequence[torch.Tensor], device_mesh: DeviceMesh, vary: Sequence[str] | None = None
) -> XLATensor:
    """A per-device tensor from each device's value.

    Args:
        values: CPU tensors of one shape and dtype, one per device of the mesh, in row-major order.
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
    if len(values) != device_mesh.size() or len({(v.shape, v.dtype) for v in values}) != 1:
        raise ValueError(
            f"from_device_values: {device_mesh!r} needs {device_mesh.size()} tensors of one shape "
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
    frame = frame_of(device_mesh)
    axes = mesh_dim_axes(device_mesh)
    stacked = torch.stack(list(values)).reshape(*device_mesh.shape, *values[0].shape)
    for dim in reversed(range(device_mesh.ndim)):
        if dim not in dims:
            stacked = stacked.select(dim, 0)
    order = [name for dim in sorted(dims) for name in axes[dim]]
    varying = union(frame, [tuple(order)])
    sizes = [frame.sizes[name] for name in order]
    stacked = stacked.reshape(*sizes, *values[0].shape)
    lead = [order.index(name) for name in varying]
    stacked = stacked.permute(*lead, *range(len(order), stacked.ndim)).contiguous()
    shape = tuple(values[0].shape)
    form = device_form(frame, shape, dtype=values[0].dtype, varying=varying)
    return XLATensor(Storage(to_devices(stacked, form), form), form)


def local_values(tensor: XLATensor) -> list[torch.Tensor]:
    """`XLATensor.local_values`."""
    trace = thread_state.current()
    if trace is not None:
        trace.refuse("local_values()")
    assertions.look()
    form = tensor._form
    array = read(tensor)
    if form.frame is None:
        return [from_numpy(np.asarray(array))]
    by_device = {shard.device: shard for shard in array.addressable_shards}
    devices = form.frame.jax_mesh.devices.flat
    return [
        from_numpy(np.asarray(by_device[device].data).reshape(form.shape)) for device in devices
    ]


def local_shards(tensor: XLAShardedTensor) -> list[LocalShard]:
    """`XLAShardedTensor.local_shards`."""
    trace = thread_state.current()
    if trace is not None:
        trace.refuse("local_shards")
    assertions.look()
    form = tensor._form
    array = read(tensor)
    if form.unreduced:
        with jax.enable_x64(True):
            (array,) = same_value(form, form.reduced()).eager(None, [array], [])
    lead = len(form.varying)
    by_device = {shard.device: shard for shard in array.addressable_shards}
    shards = []
    assert form.frame is not None
    for number, device in zip(form.frame.device_ids, form.frame.jax_mesh.devices.flat, strict=True):
        shard = by_device[device]
        index = []
        for part, size in zip(shard.index[lead:], form.shape, strict=True):
            start, stop, _ = part.indices(max(size, part.stop or 0))
            index.append(slice(min(start, size), min(stop, size)))
        data = np.asarray(shard.data)[(0,) * lead][tuple(slice(0, s.stop - s.start) for s in index)]
        shards.append(LocalShard(number, tuple(index), from_numpy(data)))
    return shards
