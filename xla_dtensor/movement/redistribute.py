"""Between layouts: ``redistribute``, ``full_tensor``, and what each device holds.

No communication is written here: the value is given its new sharding, and XLA moves the data.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from xla_dtensor.base import events, thread_state
from xla_dtensor.base.cache import Cache
from xla_dtensor.errors import MeshMismatchError, PlacementError, UnsupportedOpError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.per_device import logical
from xla_dtensor.forms.read import read
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh import normalize_placements
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.sharded_tensor import LocalShard, XLAShardedTensor


def redistribute(
    tensor: XLAShardedTensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> XLAShardedTensor:
    """`XLAShardedTensor.redistribute`."""
    mesh = device_mesh or tensor.device_mesh
    if placements is None:
        raise RuntimeError(
            f"redistribute() of a tensor on {tensor.device_mesh!r}: placements is needed, one per "
            "mesh dim"
        )
    if getattr(mesh, "device_type", None) != "xla":
        raise MeshMismatchError(f"redistribute: {mesh!r} is no xla mesh; use full_tensor().cpu()")
    placements = normalize_placements(placements, mesh, tensor.ndim, "redistribute")
    for i, (new, old) in enumerate(zip(placements, _on(tensor, mesh), strict=True)):
        if isinstance(new, Partial) and new != old:
            raise PlacementError(
                f"redistribute: mesh dim {i} of {mesh!r} is {old!r}; only an operation makes a "
                f"value {new!r}, redistribute can't"
            )
    return _Redistribute.apply(tensor, mesh, placements, forward_dtype, backward_dtype)


def _on(tensor: XLAShardedTensor, mesh: DeviceMesh) -> tuple[Placement, ...]:
    return tensor.placements if tensor.device_mesh == mesh else (Replicate(),) * mesh.ndim


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: XLAShardedTensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> XLAShardedTensor:
        ctx.source = tensor.device_mesh, tensor.placements, tensor.dtype
        ctx.backward_dtype = backward_dtype
        if forward_dtype is not None and forward_dtype != tensor.dtype:
            tensor = tensor.to(forward_dtype)
        return move(tensor, mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        mesh, placements, dtype = ctx.source
        wanted = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
        grad = as_sharded(grad, mesh)
        communication_dtype = ctx.backward_dtype or dtype
        if grad.dtype != communication_dtype:
            grad = grad.to(communication_dtype)
        grad = _Redistribute.apply(grad, mesh, wanted, None, None)
        return (grad if grad.dtype == dtype else grad.to(dtype)), None, None, None, None


def as_sharded(tensor: torch.Tensor, mesh: DeviceMesh) -> XLAShardedTensor:
    """``tensor`` itself if it is sharded, else as replicated on ``mesh``."""
    if isinstance(tensor, XLAShardedTensor):
        return tensor
    from xla_dtensor.movement.local_view import from_local

    return from_local(tensor, mesh)  # differentiable: gradients of gradients pass here


_converters: Cache[tuple[Any, Form, Form], Any] = Cache("conversions between forms", 1024)


def relayout(tensor: Any, source: Form, target: Form, convert: Any) -> Any:
    """A tensor of its own in ``target``; ``convert(array, source, target)`` computes its array.
    Below autograd."""
    if events.observer is not None:
        events.observer.relayout(convert, source, target)
    array = read(tensor)
    if thread_state.current() is not None:
        value = convert(array, source, target)
        if target.sharding is not None:
            value = jax.lax.with_sharding_constraint(value, target.sharding)
    else:
        key = (convert, source, target)
        converter = _converters.get(key)
        if converter is None:
            function = functools.partial(convert, source=source, target=target)
            converter = _converters.put(key, jax.jit(function, out_shardings=target.sharding))
        with jax.enable_x64(True):
            value = converter(array)
    cls = XLAShardedTensor if target.is_sharded else XLATensor
    return cls(Storage(value, target), target)


_movers: Cache[tuple[Form, Form], Any] = Cache("redistributions", 1024)


def move(
    tensor: XLAShardedTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> XLAShardedTensor:
    """``tensor``'s value in another layout, as a tensor of its own; below autograd."""
    source = tensor._form
    target = source.with_placements(mesh, placements)
    if events.observer is not None:
        events.observer.redistribute(source, target)
    if target.meta:
        return XLAShardedTensor(Storage(None, target), target)
    array = read(tensor)
    trace = thread_state.current()
    if trace is not None:
        _check_same_devices(source, target)
        value = logical(array, source)
        value = constrain(value, target)
        return XLAShardedTensor(Storage(value, target), target)
    assert source.frame is not None and target.frame is not None
    if source.frame.device_ids != target.frame.device_ids:
        return _move_devices(array, source, target)
    mover = _movers.get((source, target))
    if mover is None:

        def function(array: Any) -> Any:
            return target.physical(logical(array, source))

        mover = _movers.put((source, target), jax.jit(function, out_shardings=target.sharding))
    with jax.enable_x64(True):
        moved = mover(array)
    return XLAShardedTensor(Storage(moved, target), target)


def constrain(value: Any, form: Form) -> Any:
    """The traced logical ``value`` with the sharding of ``form`` asked of XLA."""
    if form.sharding is None or form.unreduced:
        return value
    return jax.lax.with_sharding_constraint(value, form.sharding)


def _check_same_devices(source: Form, target: Form) -> None:
    assert source.frame is not None and target.frame is not None
    if source.frame.device_ids != target.frame.device_ids:
        raise MeshMismatchError(
            f"redistribute from {source.mesh!r} to {target.mesh!r} inside a compiled step: one XLA "
            "program runs on one set of devices; move the tensor outside of the step"
        )


def _move_devices(array: Any, source: Form, target: Form) -> XLAShardedTensor:
    """Between meshes with different devices: reduced and padded on the source's, then copied."""

    if source.varying:
        raise MeshMismatchError(
            f"redistribute from {source.mesh!r} to {target.mesh!r}: a tensor that varies along "
            f"{list(source.varying)} can't move to other devices"
        )

    assert source.frame is not None
    replicated = source.frame.replicated

    def make() -> Any:
        def function(array: Any) -> Any:
            return target.physical(source.logical(array))

        return jax.jit(function, out_shardings=replicated)

    with jax.enable_x64(True):
        prepared = _movers.get_or_make((source, target), make)(array)
        moved = jax.device_put(prepared, target.sharding)
    return XLAShardedTensor(Storage(moved, target), target)


def full_tensor(
    tensor: XLAShardedTensor, grad_placements: Sequence[Placement] | None
) -> torch.Tensor:
    """`XLAShardedTensor.full_tensor`."""
    mesh = tensor.device_mesh
    replicated = (Replicate(),) * mesh.ndim
    if grad_placements is not None:
        grad_placements = normalize_placements(
            grad_placements, mesh, tensor.ndim, "full_tensor(grad_placements=)"
        )
        if any(not isinstance(p, Replicate | Partial) for p in grad_placements):
            raise UnsupportedOpError(
                f"full_tensor(grad_placements={list(grad_placements)}) on {mesh!r}: the gradient "
                "of a full tensor is whole on every device, so it can be Replicate or Partial"
            )
    from xla_dtensor.movement.local_view import to_local

    return to_local(tensor.redistribute(placements=replicated), grad_placements)


def local_shards(tensor: XLAShardedTensor) -> list[LocalShard]:
    """`XLAShardedTensor.local_shards`."""
    from xla_dtensor.forms.host_values import from_numpy

    trace = thread_state.current()
    if trace is not None:
        trace.refuse("local_shards")
    form = tensor._form
    array = read(tensor)
    if form.unreduced:
        reduced = form.reduced()

        def make() -> Any:
            def function(array: Any) -> Any:
                return reduced.physical(logical(array, form))

            return jax.jit(function, out_shardings=reduced.sharding)

        with jax.enable_x64(True):
            array = _movers.get_or_make((form, reduced), make)(array)
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
