"""The functional forms of views: `*_copy`, `*_scatter`, and the backwards of views."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.base.jax_private import varying_axes
from xla_dtensor.lowering.dims import wrap_dim
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers, views
from xla_dtensor.lowering.views import types  # noqa: F401  of its views, too, there are copies
from xla_dtensor.lowering.views.ranges import (
    diagonal,
    put_diagonal,
    put_select,
    put_slice,
    select,
    slice_,
    slice_bounds,
)
from xla_dtensor.lowering.views.reshapes import view
from xla_dtensor.lowering.views.strided import over_each_position, put_strided

_SCATTERS: dict[str, tuple[Callable[..., jax.Array], Callable[..., torch.Tensor]]] = {
    "slice_scatter": (put_slice, torch.ops.aten.slice.Tensor),
    "select_scatter": (put_select, torch.select),
    "diagonal_scatter": (put_diagonal, torch.diagonal),
    "as_strided_scatter": (put_strided, torch.as_strided),
}


def _scatter(
    put: Callable[..., jax.Array], seen: Callable[..., torch.Tensor]
) -> Callable[..., jax.Array]:
    """``put`` for positions and sources that torch takes."""

    @functools.wraps(put)
    def scatter(base: jax.Array, value: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        size = list(seen(torch.empty(base.shape, device="meta"), *args, **kwargs).shape)
        if list(value.shape) != size:
            raise RuntimeError(
                "expected src to have a size equal to the slice of self. src size = "
                f"{list(value.shape)}, slice size = {size}"
            )
        return put(base, value, *args, **kwargs)

    return scatter


for _name, (_put, _seen) in _SCATTERS.items():
    lowers(_name)(_scatter(_put, _seen))

for _name, _view in views().items():
    _packet, _, _overload = _name.removeprefix("aten::").partition(".")
    _copies = getattr(torch.ops.aten, f"{_packet}_copy", None)
    if _copies is not None and _overload in _copies.overloads():
        lowers(f"{_packet}_copy.{_overload}")(_view.get)
lowers("_reshape_copy")(view)


@lowers("narrow_copy")
def narrow_copy(x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    start, _ = slice_bounds(x.shape[wrap_dim(dim, x.ndim)], start, None)
    return slice_(x, dim, start, start + length)


def _transposed(get: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The backward of the view ``get``: ``backward(grad, input_sizes, *args)``. Transposing a
    slice gives a pad, which XLA partitions better than an update of zeros."""

    def backward(grad: jax.Array, input_sizes: Sequence[int], *args: Any) -> jax.Array:
        if len(args) > 1 and not isinstance(args[1], int):
            return _at_position(grad, input_sizes, *args[:2])
        wide = grad.astype(math_dtype(grad.dtype))  # overlapping windows are added up
        base: Any = jax.ShapeDtypeStruct(tuple(input_sizes), wide.dtype)
        if axes := varying_axes(wide):  # in somebody's shard_map
            base = lax.pcast(jnp.zeros(base.shape, base.dtype), tuple(axes), to="varying")
        return jax.linear_transpose(lambda x: get(x, *args), base)(wide)[0].astype(grad.dtype)

    return backward


def _at_position(
    grad: jax.Array, input_sizes: Sequence[int], dim: int, start: jax.Array
) -> jax.Array:
    """``grad`` from a position of ``dim`` on that is an input of the program, zeros elsewhere."""
    dim = wrap_dim(dim, len(input_sizes))
    if grad.ndim < len(input_sizes):  # select's
        grad = jnp.expand_dims(grad, dim)
    zeros = jnp.zeros(tuple(input_sizes), grad.dtype)
    return lax.dynamic_update_slice_in_dim(zeros, grad, start, dim)


@lowers("unfold_backward")
def unfold_backward(
    grad: jax.Array, input_sizes: Sequence[int], dim: int, size: int, step: int
) -> jax.Array:
    if not input_sizes or grad.size == 0:
        total = grad.sum() if grad.size else jnp.zeros((), grad.dtype)
        return jnp.broadcast_to(total, tuple(input_sizes))
    dim = wrap_dim(dim, len(input_sizes))
    wide = grad.astype(math_dtype(grad.dtype))
    return over_each_position(wide, input_sizes, dim, size, step).sum(dim).astype(grad.dtype)


_BACKWARDS: dict[str, Callable[..., jax.Array]] = {
    "slice_backward": slice_,
    "select_backward": select,
    "diagonal_backward": diagonal,
}
for _name, _get in _BACKWARDS.items():
    lowers(_name, has_position=_get is not diagonal)(_transposed(_get))
