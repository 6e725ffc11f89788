"""Gathers and scatters with an index per element, and how values at one place are combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering.dims import wrap_dim
from xla_dtensor.lowering.partitioned.cut import cut
from xla_dtensor.lowering.partitioned.scatter import highest, lowest, narrow, write_each
from xla_dtensor.lowering.registry import lowers


def widened(dtype: Any) -> Any:
    """The dtype in which many values are added up: half precision loses small addends."""
    return np.float32 if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def _cut(x: jax.Array, shape: Sequence[int], dim: int) -> jax.Array:
    """``x`` cut to ``shape`` in every dim but ``dim``: torch lets an index be smaller."""
    limits = [x.shape[d] if d == dim else n for d, n in enumerate(shape)]
    return cut(x, [0] * x.ndim, limits)


@lowers("gather")
def gather(x: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False) -> jax.Array:
    dim = wrap_dim(dim, x.ndim)
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    if x.ndim == 0 or index.ndim == 0:
        return gather(x.reshape(-1), 0, index.reshape(-1)).reshape(index.shape)
    x = _cut(x, index.shape, dim)
    return jnp.take_along_axis(x, narrow(index, x.shape[dim]), dim, mode="promise_in_bounds")


@lowers("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce")
@lowers("scatter_reduce.two")
def scatter(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    src: Any,
    reduce: str = "set",
    *,
    include_self: bool = True,
) -> jax.Array:
    if index.size == 0:
        return x
    if x.ndim == 0 or index.ndim == 0:
        src = src.reshape(-1) if getattr(src, "ndim", 0) else src
        flat = x.reshape(-1), 0, index.reshape(-1), src, reduce
        out = scatter(*flat, include_self=include_self)
        return out.reshape(x.shape)
    dim = wrap_dim(dim, x.ndim)
    if getattr(src, "ndim", 0) == index.ndim:
        src = cut(src, [0] * index.ndim, index.shape)
    src = jnp.broadcast_to(jnp.asarray(src).astype(x.dtype), index.shape)
    update = lambda base, method, value: write_each(base, dim, index, method, value)
    return reduced(x, src, reduce, include_self, update)


def reduced(
    x: jax.Array,
    src: jax.Array,
    reduce: str,
    include_self: bool,
    update: Callable[[jax.Array, str, jax.Array], jax.Array],
) -> jax.Array:
    """``x`` with ``src`` combined into it by ``update(base, method, values)``, an update of the
    scattered-to positions."""
    if x.dtype.kind == "b":  # adding is or, multiplying is and
        reduce = {"sum": "amax", "add": "amax", "prod": "amin", "multiply": "amin"}.get(
            reduce, reduce
        )
    method, identity = _REDUCTIONS[reduce](x.dtype)
    if method == "set":
        return update(x, "set", src)
    wide = widened(x.dtype) if method in ("add", "multiply") else x.dtype
    base, src = x.astype(wide), src.astype(wide)
    if not include_self:
        base = update(base, "set", jnp.full_like(src, identity))
    out = update(base, method, src)
    if reduce != "mean":
        return out
    first = jnp.full(x.shape, int(include_self), np.int32)
    count = jnp.maximum(update(first, "add", jnp.ones_like(src, dtype=np.int32)), 1).astype(wide)
    return out / count if jnp.issubdtype(wide, jnp.inexact) else jnp.floor_divide(out, count)


# torch's name -> the method of `x.at[...]` and its identity for a dtype.
_REDUCTIONS: dict[str, Callable[[Any], tuple[str, Any]]] = {
    "set": lambda dtype: ("set", 0),
    "sum": lambda dtype: ("add", 0),
    "add": lambda dtype: ("add", 0),
    "mean": lambda dtype: ("add", 0),
    "prod": lambda dtype: ("multiply", 1),
    "multiply": lambda dtype: ("multiply", 1),
    "amax": lambda dtype: ("max", lowest(dtype)),
    "amin": lambda dtype: ("min", highest(dtype)),
}


@lowers("scatter_add")
def scatter_add(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return scatter(x, dim, index, src, "sum")
