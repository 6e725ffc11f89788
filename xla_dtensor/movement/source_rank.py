"""``src_data_rank``: which process's value is used where each of several has its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base import executor
from xla_dtensor.errors import DivergenceError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import from_numpy, padded_slice, to_numpy
from xla_dtensor.mesh import Frame, frame_of, mesh_dim_axes
from xla_dtensor.runtime import agreement, arrays, broadcast, processes
from xla_dtensor.tensors.of_form import is_ours

_INSTEAD = (
    "Seed all processes alike, or let them take one process's: distribute_tensor with "
    "src_data_rank=0 (before fully_shard), DTensor.from_local with run_check=True"
)


def is_own(tensor: torch.Tensor) -> bool:
    """Whether there are several processes, and this is a value that each has of its own."""
    if not processes.several() or tensor.is_meta:
        return False
    if not executor.current().has_values:
        return False  # a step's call compares its inputs by itself
    return not is_ours(tensor) or tensor._storage_.form.frame is None


def take(value: np.ndarray, mesh: DeviceMesh, rank: int) -> bool:
    """Overwrite what this process has with what the device that is ``rank`` along all dims of
    ``mesh`` has, as ``distribute_tensor`` does; all processes call it.

    Returns:
        whether what was taken differs along dims that ``mesh`` leaves out.

    Raises:
        ValueError: a mesh dim has no such rank.
        DivergenceError: it does, and a process has several devices.
    """
    sources = _sources(mesh, rank)
    source, *more = sorted(set(sources))
    if not more:
        broadcast.send(value, source)
        return False
    sums = arrays.checksums(value)
    if len({sums[index] for index in sources}) == 1:
        if len(set(sums)) > 1:
            broadcast.send(value, source)
        return False
    if not frame_of(mesh).one_each:
        a, b = next((a, b) for a in sources for b in sources if sums[a] != sums[b])
        raise DivergenceError(
            f"{processes.known(a)} and {processes.known(b)} have different values of a tensor of "
            f"shape {list(value.shape)}, {value.dtype}, and each is the source of its part of the "
            f"devices, since {mesh!r} has some of the dims of its root only; where processes have "
            "several devices it has to be one value. Distribute it over the root mesh, or seed all "
            "processes alike"
        )
    own = value.copy()
    # In the same order in all processes, as each takes part in every broadcast.
    for index in (source, *more):
        sent = own.copy()
        broadcast.send(sent, index)
        if sources[processes.index()] == index:
            value[...] = sent
    return True


def _sources(mesh: DeviceMesh, rank: int) -> tuple[int, ...]:
    """Whose value each process takes."""
    if not 0 <= rank < min(mesh.shape):
        raise ValueError(
            f"src_data_rank={rank}: {mesh!r} has a dim of {min(mesh.shape)}, and it is the rank "
            "along each dim"
        )
    frame = frame_of(mesh)
    devices = frame.jax_mesh.devices
    owners = np.array([d.process_index for d in devices.flat]).reshape(devices.shape)
    at = [slice(None)] * owners.ndim
    for names in mesh_dim_axes(mesh):
        position = rank
        for name in reversed(names):
            position, index = divmod(position, frame.sizes[name])
            at[frame.jax_mesh.axis_names.index(name)] = slice(index, index + 1)
    sources = np.broadcast_to(owners[tuple(at)], owners.shape)
    return tuple(int(sources[owners == index][0]) for index in range(processes.count()))


def put_own(value: np.ndarray, form: Form) -> Any:
    """The array in ``form`` of which each device has its shard of its process's value."""
    import jax

    with jax.enable_x64(True):
        return arrays.put_shards(
            form.padded_shape, form.sharding, lambda index: padded_slice(value, index)
        )


def check_shared(value: np.ndarray, form: Form) -> None:
    """See that processes whose devices hold the same shard have the same elements in it.

    Raises:
        DivergenceError: they haven't.
    """
    if not agreement.checks_values():
        return None
    if _is_rearranged(form):
        # torch's piece of a device may lie on another process's device in XLA's order.
        return broadcast.check_shared(value, {"as a whole": value}, _INSTEAD)
    held: dict[tuple[tuple[int, int], ...], set[int]] = {}
    slices: dict[tuple[tuple[int, int], ...], tuple[slice, ...]] = {}
    shape = form.padded_shape
    for device, index in form.sharding.devices_indices_map(shape).items():
        key = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        held.setdefault(key, set()).add(device.process_index)
        slices[key] = index
    shared = {key: index for key, index in held.items() if len(index) > 1}
    if not shared:
        return None  # all processes return here, as they have the same sharding
    own = {
        f"[{', '.join(f'{start}:{stop}' for start, stop in key)}]": padded_slice(value, slices[key])
        for key, holders in shared.items()
        if processes.index() in holders
    }
    return broadcast.check_shared(value, own, _INSTEAD)


def check_beside(value: np.ndarray, frame: Frame, axes: tuple[str, ...]) -> None:
    """See that processes at the same place along ``axes`` of ``frame``, along which each has a
    value of its own, have the same value.

    Raises:
        DivergenceError: they haven't.
    """
    if not agreement.checks_values() or set(axes) == set(frame.process_axes):
        return
    names = frame.jax_mesh.axis_names
    at = {
        tuple(int(index[names.index(name)]) for name in axes)
        for index, device in np.ndenumerate(frame.jax_mesh.devices)
        if device.process_index == processes.index()
    }
    own = f"at {', '.join(map(str, sorted(at)))} along {', '.join(axes)}"
    broadcast.check_shared(value, {own: value}, _INSTEAD)


def _is_rearranged(form: Form) -> bool:
    """Whether mesh dims share a tensor dim that they don't divide."""
    placements = form.placements or ()
    dims = [placement.dim for placement in placements if hasattr(placement, "dim")]
    uneven = (d for d in dims if form.shape[d] != form.padded_shape[d])
    return any(dims.count(d) > 1 for d in uneven)


def synchronize(tensors: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Overwrite tensors that each process has of its own with those of the first device of
    ``mesh``, as ``DistributedDataParallel`` does when it wraps a module."""
    for tensor in tensors:
        if is_own(tensor):
            value = to_numpy(tensor.detach().cpu())
            before = value.tobytes()
            take(value, mesh, 0)
            if value.tobytes() != before:
                with torch.no_grad():
                    tensor.copy_(from_numpy(value))
