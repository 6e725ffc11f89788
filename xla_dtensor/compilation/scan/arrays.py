"""Arrays of a loop over layers: each layer's tensors as logical values, stacked and unstacked."""

from __future__ import annotations

import functools
from typing import Any

import jax
from torch.distributed.tensor import Replicate

from xla_dtensor.base.strictness import ALWAYS
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form, device_form, sharded_form
from xla_dtensor.forms.per_device import logical
from xla_dtensor.forms.read import logical_value
from xla_dtensor.lowering.ops.for_each import for_each
from xla_dtensor.plans.pin import pin


def fresh(form: Form) -> Form:
    """The form of a tensor of its own with the same value: no pending reduction, no gaps."""
    about = form.shape, None, 0, form.dtype
    if form.mesh is None:
        return device_form(form.frame, *about, varying=form.varying)
    assert form.placements is not None
    return sharded_form(form.mesh, form.placements, *about, varying=form.varying)


def whole_sums(form: Form) -> Form:
    """The form of a gradient of such a tensor: where that is a sum of parts, each has all of it."""
    if form.mesh is None or form.placements is None:
        return form
    placements = tuple(Replicate() if p.is_partial() else p for p in form.placements)
    return form if placements == form.placements else form.with_placements(form.mesh, placements)


def logical_shape(form: Form) -> tuple[int, ...]:
    lead = form.array_shape[: len(form.array_shape) - len(form.shape)]
    return (*lead, *form.shape)


def in_form(tensor: Any, form: Form) -> Any:
    """The logical value of a tensor, as `of_form` gives it."""
    return of_form(logical_value(tensor), tensor._form, form)


def of_form(value: Any, source: Form, form: Form) -> Any:
    """A value in a loop, what layers give one another and their gradients, as ``form`` says.

    Nobody has asked for that layout, it is what the first layer's rules gave. Where layouts are
    chosen over the step it is one way for the loop's values to lie, and no more. (A table cut by
    its columns gives a stream cut by its features, which each product would have to move.)

    Args:
        source: the form that it has.
    """
    if source.varying != form.varying:
        raise UnsupportedOpError(
            f"scan_layers: a layer's result varies along {list(source.varying)}, its argument "
            f"along {list(form.varying)}, and what a layer gives the next one takes. Run such "
            "layers one by one"
        )
    if form.sharding is None or source.placements == form.placements:
        return value
    return pin(ALWAYS)(value, form.computed_sharding)


@functools.partial(jax.jit, static_argnums=0)
def stack(form: Form, *values: Any) -> Any:
    """One equation of the step, whatever the number of layers."""
    rows = for_each(_with_dim, [[logical(value, form)] for value in values], key=_with_dim)
    stacked = jax.lax.concatenate([row for (row,) in rows], 0)
    if form.sharding is None:
        return stacked
    spec = jax.sharding.PartitionSpec(None, *form.sharding.spec)
    sharding = jax.sharding.NamedSharding(form.sharding.mesh, spec)
    return jax.lax.with_sharding_constraint(stacked, sharding)


@functools.partial(jax.jit, static_argnums=1)
def unstack(array: Any, count: int) -> list[Any]:
    """The values of the layers apart."""
    rows = [[row] for row in jax.lax.split(array, [1] * count)]
    rows = for_each(_without_dim, rows, key=_without_dim)
    return [value for (value,) in rows]


def _with_dim(row: Any, _: Any) -> list[Any]:
    return [jax.lax.expand_dims(row[0], (0,))]


def _without_dim(row: Any, _: Any) -> list[Any]:
    return [jax.lax.squeeze(row[0], (0,))]
