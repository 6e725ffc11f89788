"""View steps: the value of a view from its storage's array, and writes back through the view."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.base.tables.keys import thaw
from xla_dtensor.base.torch_private.attributes import schema_of
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.local_form import from_devices, to_devices
from xla_dtensor.forms.per_device import logical, over_devices, union
from xla_dtensor.lowering import ViewLowering
from xla_dtensor.lowering.context import Target, at, here
from xla_dtensor.lowering.views.changes import put_changes

if TYPE_CHECKING:
    import jax
    import torch

    from xla_dtensor.forms.form import Form


_RESHAPES = frozenset(f"aten::{name}" for name in ("view", "_unsafe_view", "_reshape_alias"))


@dataclass(frozen=True)
class ViewStep:
    """One view operation on the way from a storage to a tensor.

    Attributes:
        lowering: reads and writes through the view.
        args: the view's arguments after the tensor, hashable.
        kwargs: its keyword arguments as pairs.
        index: which result, of a view with several (``split``, ``unbind``).
        shape: the view's logical shape.
        op: torch's overload, which makes the view of a tensor; None of a step that is only part of
            one (``as_strided``).
    """

    lowering: ViewLowering
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    index: int | None
    shape: tuple[int, ...]
    op: Any = field(default=None, compare=False)

    def __hash__(self) -> int:
        # Cached: each operation on a view looks something up by its view steps.
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            compared = (field.name for field in dataclasses.fields(self) if field.compare)
            known = hash(tuple(getattr(self, name) for name in compared))
            self.__dict__["_hash"] = known
        return known

    @property
    def is_reshape(self) -> bool:
        """Whether it gives the elements another shape, in their order."""
        return self.op is not None and schema_of(self.op).name in _RESHAPES

    def get(self, base: jax.Array) -> jax.Array:
        """The view's value from its base's."""
        value = self.lowering.get(base, *map(thaw, self.args), **self._kwargs())
        return value if self.index is None else value[self.index]

    def put(self, base: jax.Array, value: jax.Array, size: int) -> jax.Array:
        """The base's value after the view, or a part of it, was written to.

        Args:
            value: the view's.
            size: the bytes of the narrowest type as which the view was looked at.
        """
        view, args, kwargs = self.lowering, list(map(thaw, self.args)), self._kwargs()
        if view.repeats is not None and view.repeats(base.shape, *args, **kwargs):
            return put_changes(view, base, value, size, args, kwargs)
        which = () if self.index is None else (self.index,)
        return view.put(base, value, *which, *args, **kwargs)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of ``tensor`` that torch makes, with a history if that has one."""
        view = self.op(tensor, *map(thaw, self.args), **self._kwargs())
        return view if self.index is None else view[self.index]

    def _kwargs(self) -> dict[str, Any]:
        return {name: thaw(value) for name, value in self.kwargs}


class TracedStart:
    """A position that is an input of the compiled step that is being traced.

    Attributes:
        array: the traced scalar.
    """

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array


@dataclass(frozen=True)
class PositionStep(ViewStep):
    """A step that takes one position, or a range, of a dim: ``x[:, t]``, ``x[t : t + 4]``.

    Eagerly the position is an input of the programs that read and write through the step, so that
    a loop over positions needs one of each. In a compiled step it is the number that it is, or a
    `TracedStart` where that is an input of the step.

    Attributes:
        lowering: of ``select`` or ``slice``, whichever overload made the view.
        dim: counted from the front.
        length: of the range; None where the view hasn't the dim.
        start: the position: a number, or what stands for it in a program; None if left open.
        left_open: the same step without its start, which all such steps have in common.
    """

    dim: int = 0
    length: int | None = None
    start: Any = None
    left_open: PositionStep | None = field(default=None, compare=False)

    __hash__ = ViewStep.__hash__  # @dataclass would make another one

    def starting_at(self, start: Any) -> PositionStep:
        """This step, left open, with a start."""
        return dataclasses.replace(self, start=start)

    def get(self, base: jax.Array) -> jax.Array:
        """The view's value from its base's."""
        if isinstance(self.start, int):
            return self.lowering.get(base, *self._arguments(self.start))
        part = lax.dynamic_slice_in_dim(base, _array(self.start), self.length or 1, self.dim)
        return part if self.length is not None else lax.squeeze(part, [self.dim])

    def put(self, base: jax.Array, value: jax.Array, size: int) -> jax.Array:
        """The base's value after ``value`` was written to the view."""
        if isinstance(self.start, int):
            return self.lowering.put(base, value, *self._arguments(self.start))
        before, after = base.shape[: self.dim], base.shape[self.dim + 1 :]
        if self.length is None:
            value = jnp.expand_dims(jnp.broadcast_to(value, before + after), self.dim)
        value = jnp.broadcast_to(value, (*before, self.length or 1, *after)).astype(base.dtype)
        return lax.dynamic_update_slice_in_dim(base, value, _array(self.start), self.dim)

    def _arguments(self, start: int) -> tuple[int, ...]:
        """Those of ``lowering``: ``select``'s, or ``slice``'s."""
        return (self.dim, start) if self.length is None else (self.dim, start, start + self.length)


@dataclass(frozen=True)
class CrossingStep:
    """The step from a sharded tensor to what its devices hold, or back.

    Attributes:
        source, target: the forms before and after; one sharded, one per device.
    """

    source: Form
    target: Form

    def get(self, base: jax.Array) -> jax.Array:
        """The whole array in ``target`` from the one in ``source``."""
        convert = to_devices if self.source.is_sharded else from_devices
        return convert(base, self.source, self.target)

    def put(self, base: jax.Array, value: jax.Array) -> jax.Array:
        """The inverse of `get`: of ``base`` nothing remains."""
        return CrossingStep(self.target, self.source).get(value)


Step = ViewStep | CrossingStep


def _array(start: Any) -> Any:
    return start.array if start.__class__ is TracedStart else start


def is_at_traced(steps: tuple[Step, ...]) -> bool:
    """Whether one of the steps takes a position that is an input of a compiled step."""
    return any(s.__class__ is PositionStep and s.start.__class__ is TracedStart for s in steps)


def refuse_offset() -> NoReturn:
    """Raise for what wants to know where in the memory such a view begins."""
    raise UnsupportedOpError(
        "where in the memory a view begins whose position is an input of the compiled step "
        "(as_strided, storage_offset)"
    )


def leave_open(steps: tuple[Step, ...]) -> tuple[tuple[Step, ...], tuple[Any, ...]]:
    """``steps`` without their positions, and these."""
    if PositionStep not in map(type, steps):  # as of most views
        return steps, ()
    positions = tuple(_array(s.start) for s in steps if s.__class__ is PositionStep)
    return tuple(getattr(s, "left_open", s) for s in steps), positions


def with_positions(steps: tuple[Step, ...], positions: Sequence[Any]) -> tuple[Step, ...]:
    """What `leave_open` has taken apart, put together: with numbers, or what stands for them."""
    if not positions:
        return steps
    rest = iter(positions)
    return tuple(s.starting_at(next(rest)) if s.__class__ is PositionStep else s for s in steps)


def read_through(base: jax.Array, form: Form, steps: tuple[Step, ...]) -> jax.Array:
    """The logical value of the view ``steps`` of ``base``.

    Args:
        base: an array in ``form``.

    Returns:
        the logical value, behind the axes along which it varies.
    """
    if isinstance(steps[0], CrossingStep):
        # A view of what devices hold starts from the array as it is, with its leading axes.
        base = form.fetched(base)
    else:
        base = logical(base, form)
        base = _uneven_dims_whole(base, form, steps)
    for step in steps:
        if isinstance(step, CrossingStep):
            base, form = step.get(base), step.target
        else:
            with _on_devices_of(form):
                base = over_devices(step.get, [form.varying], form.frame, form.is_sharded)(base)
    return base


def _on_devices_of(form: Form) -> AbstractContextManager[None]:
    """Lowerings of views are told how many devices there are."""
    devices = 1 if form.frame is None else len(form.frame.device_ids)
    return at(Target(here().platform, devices=devices))


def _uneven_dims_whole(base: jax.Array, form: Form, steps: tuple[Step, ...]) -> jax.Array:
    """``base`` with those dims whole on each device that are in uneven shards, and that a view
    merges with others or takes apart (`base/xla_faults.py`, UNEVEN_SPLITS)."""
    if form.padded_shape == form.shape or form.varying:
        return base
    reshapes = [step for step in steps if isinstance(step, ViewStep) and step.is_reshape]
    if not reshapes:
        return base
    pairs = enumerate(zip(form.shape, form.padded_shape, strict=True))
    uneven = {d for d, (size, padded) in pairs if size != padded}
    if reshapes[0] is steps[0]:
        uneven -= _kept_by_reshape(form.shape, reshapes[0].shape)
    return _whole_in(base, form, uneven)


def _written_whole(value: jax.Array, form: Form, step: ViewStep, base: jax.Array) -> jax.Array:
    """The same of what is written through a view, which lies as XLA likes: of dims that it can't
    shard evenly."""
    if form.frame is None or not step.is_reshape:
        return value
    sizes = [size for size in form.frame.jax_mesh.shape.values() if size > 1]
    dims = enumerate(value.shape)
    uneven = {d for d, n in dims if n > 1 and any(n % size for size in (*sizes, math.prod(sizes)))}
    return _whole_in(value, form, uneven - _kept_by_reshape(value.shape, base.shape))


def _whole_in(value: jax.Array, form: Form, dims: set[int]) -> jax.Array:
    if not dims or form.frame is None or value.ndim <= max(dims):
        return value
    spec = [None if d in dims else PartitionSpec.UNCONSTRAINED for d in range(value.ndim)]
    sharding = NamedSharding(form.frame.jax_mesh, PartitionSpec(*spec))
    return lax.with_sharding_constraint(value, sharding)


def _kept_by_reshape(before: tuple[int, ...], after: tuple[int, ...]) -> set[int]:
    """The dims that are a dim of the same elements in both shapes."""
    there = {(math.prod(after[:d]), size) for d, size in enumerate(after)}
    return {d for d, size in enumerate(before) if (math.prod(before[:d]), size) in there}


def write_through(
    base: jax.Array, form: Form, steps: tuple[Step, ...], value: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """``base`` after ``value`` was written to its view ``steps``.

    Args:
        base: an array in ``form``.
        axes: those along which ``value`` varies: the view's, and perhaps more.

    Returns:
        the new logical value, which varies along all of ``axes`` that aren't the mesh's own.
    """

    # Returns the new value, the axes along which it varies, and the narrowest dtype's itemsize.
    def write(
        base: jax.Array, form: Form, steps: tuple[Step, ...]
    ) -> tuple[jax.Array, tuple[str, ...], int]:
        if not steps:
            return value, axes, value.dtype.itemsize
        first, rest = steps[0], steps[1:]
        if isinstance(first, CrossingStep):
            part = first.get(base) if rest else value
            inside, _, size = write(part, first.target, rest)
            return first.put(base, inside), first.source.varying, size
        own, frame, sharded = form.varying, form.frame, form.is_sharded
        part = value
        if rest:
            with _on_devices_of(form):
                part = over_devices(first.get, [own], frame, sharded)(base)
        inside, varying, size = write(part, form, rest)
        size = min(size, inside.dtype.itemsize)
        both = union(frame, [own, varying])
        if not both:
            inside = _written_whole(inside, form, first, base)
        put = over_devices(partial(first.put, size=size), [own, both], frame, sharded)
        with _on_devices_of(form):
            return put(base, inside), both, size

    if isinstance(steps[0], CrossingStep):
        base = form.fetched(base)
    else:
        base = logical(base, form)
    return write(base, form, steps)[0]
