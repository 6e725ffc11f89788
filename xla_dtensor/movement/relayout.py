"""Converts tensors to other layouts (forms), below autograd.

No communication is written here: the value is given its new sharding, and XLA moves the data.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base import events, executor
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.errors import MeshMismatchError
from xla_dtensor.execution.batch_program import Conversion
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.per_device import logical
from xla_dtensor.forms.read import read
from xla_dtensor.forms.sharing import launching
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh.intermediate import intermediate_shardings
from xla_dtensor.movement.scattered import scattered
from xla_dtensor.runtime import agreement, arrays
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

conversions: Cache[tuple[Any, Form, Form], Conversion] = Cache("conversions between forms", 2048)
"""By the function that converts, and the forms from and to which it does."""


def relayout(tensor: Any, source: Form, target: Form, convert: Any) -> Any:
    """A tensor of its own in ``target``; ``convert(array, source, target)`` computes its array.
    Below autograd."""
    observer = events.observer
    if observer is not None:
        observer.relayout(convert, source, target)

    def traced(array: Any) -> Any:
        value = convert(array, source, target)
        if target.sharding is not None:
            value = jax.lax.with_sharding_constraint(value, target.computed_sharding)
        return value

    conversion = functools.partial(_conversion, "converts", convert, source, target)
    return executor.current().convert(tensor, target, conversion, traced)


def move(
    tensor: XLAShardedTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> XLAShardedTensor:
    """``tensor``'s value in another layout, as a tensor of its own; below autograd."""
    return to_form(tensor, tensor._form.with_placements(mesh, placements))


def to_form(tensor: XLAShardedTensor, target: Form) -> XLAShardedTensor:
    """The same in ``target``, its form `with_placements`."""
    source = tensor._form
    observer = events.observer
    if observer is not None:
        observer.redistribute(source, target)
    if target.meta:
        return XLAShardedTensor(Storage(None, target), target)
    assert source.frame is not None and target.frame is not None
    if source.frame.device_ids != target.frame.device_ids:
        _refuse_in_step(source, target)
        with launching():  # another thread's step may take the array over
            return _move_devices(read(tensor), source, target)

    def traced(array: Any) -> Any:
        value = logical(array, source)
        if _turns(source, target):
            value = constrain(value, source)
        return constrain(_on_the_way(value, source, target), target)

    now = executor.current()
    moved: XLAShardedTensor = now.convert(
        tensor, target, functools.partial(same_value, source, target), traced
    )
    now.is_copy(moved, tensor)
    return moved


def same_value(source: Form, target: Form, sharding: Any = None) -> Conversion:
    """The conversion to another layout of the same value.

    Args:
        sharding: of the result where it isn't ``target``'s yet.
    """
    return _conversion("redistributes", _reduced, source, target, sharding)


def _conversion(
    what: str, convert: Any, source: Form, target: Form, sharding: Any = None
) -> Conversion:
    """The conversion by ``convert``, made once; ``what`` it does, for processes that must agree."""

    def make() -> Conversion:
        _agree(what, source, target)
        return Conversion(convert, source, target, sharding)

    # `sharding` isn't in the key: it is given only where the devices of the forms differ.
    return conversions.get_or_make((convert, source, target), make)


def _reduced(array: Any, source: Form, target: Form) -> Any:
    return target.physical(_on_the_way(logical(array, source), source, target))


def _turns(source: Form, target: Form) -> bool:
    """Whether a mesh axis goes from one dim to another: devices exchange what they have computed.

    Elsewhere where a value was is a label. Here it says who computes it: tokens that go back from
    experts to where they came from were computed where the experts are, and with the target alone
    XLA brings the experts' weights to the tokens.
    """
    if source.unreduced or any(placement.is_partial() for placement in source.placements or ()):
        return False
    before = {axis: dim for dim, axes in enumerate(source.dim_axes) for axis in axes}
    return any(
        before.get(axis, dim) != dim for dim, axes in enumerate(target.dim_axes) for axis in axes
    )


def _on_the_way(value: Any, source: Form, target: Form) -> Any:
    """``value`` with what XLA must be told, or must not see, on its way to ``target``."""
    if source.frame is target.frame and source.frame is not None:
        for sharding in intermediate_shardings(source.frame, source.dim_axes, target.dim_axes):
            value = jax.lax.with_sharding_constraint(value, sharding)
    return scattered(_held(value, source, target), source, target)


def _held(value: Any, source: Form, target: Form) -> Any:
    """``value`` as something XLA doesn't look behind, where it would mix rows up.

    Where the later axes of a dim stay and an earlier one goes, XLA may lose their order
    (`base/xla_faults.py:LOST_ORDERS`), and gets the value from behind a barrier.
    """
    for before, after in zip(source.dim_axes, target.dim_axes, strict=True):
        if len(before) > 1 and after and before[: len(after)] != after:
            return jax.lax.optimization_barrier(value)
    return value


def _agree(what: str, source: Form, target: Form) -> None:
    if source.frame is not None:
        agreement.agree(lambda: f"{what} {source} to {target}")


def constrain(value: Any, form: Form) -> Any:
    """The traced logical ``value`` with the sharding of ``form`` asked of XLA."""
    if form.sharding is None or form.unreduced:
        return value
    return jax.lax.with_sharding_constraint(value, form.computed_sharding)


def _refuse_in_step(source: Form, target: Form) -> None:
    assert source.frame is not None and target.frame is not None
    same = set(source.frame.device_ids) == set(target.frame.device_ids)
    executor.current().not_in_step(
        f"redistribute from {source.mesh!r} to {target.mesh!r} inside a compiled step: one XLA "
        f"program runs on one {'order' if same else 'set'} of devices; move the tensor outside "
        "of the step",
        MeshMismatchError,
    )


def _move_devices(array: Any, source: Form, target: Form) -> XLAShardedTensor:
    """Between meshes with different devices: reduced and padded on the source's, then copied."""

    if source.varying:
        raise MeshMismatchError(
            f"redistribute from {source.mesh!r} to {target.mesh!r}: a tensor that varies along "
            f"{list(source.varying)} can't move to other devices"
        )

    assert source.frame is not None

    conversion = same_value(source, target, source.frame.replicated)
    with jax.enable_x64(True):
        (prepared,) = conversion.eager(None, [array], [])
        moved = arrays.put(prepared, target.sharding)
    return XLAShardedTensor(Storage(moved, target), target)
