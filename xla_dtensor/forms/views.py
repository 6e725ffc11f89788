"""Looking at an array through a chain of steps, and writing through it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xla_dtensor.base.keys import thaw
from xla_dtensor.forms.local_form import from_devices, to_devices
from xla_dtensor.forms.per_device import logical, over_devices, union
from xla_dtensor.lowering import ViewLowering

if TYPE_CHECKING:
    import jax
    import torch

    from xla_dtensor.forms.form import Form


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

    def get(self, base: jax.Array) -> jax.Array:
        """The view's value from its base's."""
        value = self.lowering.get(base, *map(thaw, self.args), **self._kwargs())
        return value if self.index is None else value[self.index]

    def put(self, base: jax.Array, value: jax.Array) -> jax.Array:
        """The base's value after ``value`` was written to the view."""
        which = () if self.index is None else (self.index,)
        return self.lowering.put(base, value, *which, *map(thaw, self.args), **self._kwargs())

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of ``tensor`` that torch makes, with a history if that has one."""
        view = self.op(tensor, *map(thaw, self.args), **self._kwargs())
        return view if self.index is None else view[self.index]

    def _kwargs(self) -> dict[str, Any]:
        return {name: thaw(value) for name, value in self.kwargs}


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


def read_through(base: jax.Array, form: Form, steps: tuple[Step, ...]) -> jax.Array:
    """The logical value of the view ``steps`` of ``base``.

    Args:
        base: an array in ``form``.

    Returns:
        the logical value, behind the axes along which it varies.
    """
    if not isinstance(steps[0], CrossingStep):
        base = logical(base, form)
    for step in steps:
        if isinstance(step, CrossingStep):
            base, form = step.get(base), step.target
        else:
            base = over_devices(step.get, [form.varying], form.frame, form.is_sharded)(base)
    return base


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

    # With what it returns, the axes along which that varies.
    def write(
        base: jax.Array, form: Form, steps: tuple[Step, ...]
    ) -> tuple[jax.Array, tuple[str, ...]]:
        if not steps:
            return value, axes
        first, rest = steps[0], steps[1:]
        if isinstance(first, CrossingStep):
            inside = write(first.get(base), first.target, rest)[0] if rest else value
            return first.put(base, inside), first.source.varying
        own, frame, sharded = form.varying, form.frame, form.is_sharded
        inside, varying = value, axes
        if rest:
            part = over_devices(first.get, [own], frame, sharded)(base)
            inside, varying = write(part, form, rest)
        both = union(frame, [own, varying])
        put = over_devices(first.put, [own, both], frame, sharded)
        return put(base, inside), both

    if not isinstance(steps[0], CrossingStep):
        base = logical(base, form)
    return write(base, form, steps)[0]
