"""Another layout for a value, below autograd.

No communication is written here: the value is given its new sharding, and XLA moves the data.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base import events, thread_state
from xla_dtensor.base.cache import Cache
from xla_dtensor.errors import MeshMismatchError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.per_device import logical
from xla_dtensor.forms.read import read
from xla_dtensor.forms.storage import Storage
from xla_dtensor.runtime import agreement, arrays
from xla_dtensor.tensors.of_form import new_tensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

_converters: Cache[tuple[Any, Form, Form], Any] = Cache("conversions between forms", 1024)


def relayout(tensor: Any, source: Form, target: Form, convert: Any) -> Any:
    """A tensor of its own in ``target``; ``convert(array, source, target)`` computes its array.
    Below autograd."""
    observer = events.observer
    if observer is not None:
        observer.relayout(convert, source, target)
    array = read(tensor)
    if thread_state.current() is not None:
        value = convert(array, source, target)
        if target.sharding is not None:
            value = jax.lax.with_sharding_constraint(value, target.sharding)
    else:
        key = (convert, source, target)
        converter = _converters.get(key)
        if converter is None:
            _agree("converts", source, target)
            function = functools.partial(convert, source=source, target=target)
            converter = _converters.put(key, jax.jit(function, out_shardings=target.sharding))
        with jax.enable_x64(True):
            value = converter(array)
    return new_tensor(value, target)


movers: Cache[tuple[Form, Form], Any] = Cache("redistributions", 1024)


def move(
    tensor: XLAShardedTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> XLAShardedTensor:
    """``tensor``'s value in another layout, as a tensor of its own; below autograd."""
    source = tensor._form
    target = source.with_placements(mesh, placements)
    observer = events.observer
    if observer is not None:
        observer.redistribute(source, target)
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
    mover = movers.get((source, target))
    if mover is None:
        _agree("redistributes", source, target)

        def function(array: Any) -> Any:
            return target.physical(logical(array, source))

        mover = movers.put((source, target), jax.jit(function, out_shardings=target.sharding))
    with jax.enable_x64(True):
        moved = mover(array)
    return XLAShardedTensor(Storage(moved, target), target)


def _agree(what: str, source: Form, target: Form) -> None:
    if source.frame is not None:
        agreement.agree(lambda: f"{what} {source} to {target}")


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
        prepared = movers.get_or_make((source, target), make)(array)
        moved = arrays.put(prepared, target.sharding)
    return XLAShardedTensor(Storage(moved, target), target)
