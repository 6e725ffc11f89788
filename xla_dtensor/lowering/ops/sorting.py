"""Sorts, searches in what is sorted, and order statistics: median, mode, k-th value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.lowering.dims import wrap_dim
from xla_dtensor.lowering.ops.scatter import gather
from xla_dtensor.lowering.partitioned.per_slice import per_slice
from xla_dtensor.lowering.promotion import is_integral, promote
from xla_dtensor.lowering.registry import lowers

# Sorting -------------------------------------------------------------------------------------


@lowers("sort", "sort.stable")
def sort(
    x: jax.Array, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """Values and their positions, equal ones in their original order; NaN is the greatest."""
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    dim = wrap_dim(dim, x.ndim)
    positions = lax.broadcasted_iota(np.int64 if x.shape[dim] >= 2**31 else np.int32, x.shape, dim)
    if descending:  # reversed before and after, so that equal values keep their order
        x, positions = lax.rev(x, [dim]), lax.rev(positions, [dim])
    values, positions = lax.sort((x, positions), dimension=dim, is_stable=True, num_keys=1)
    if descending:
        values, positions = lax.rev(values, [dim]), lax.rev(positions, [dim])
    return values, positions.astype(np.int64)


@lowers("topk")
def topk(
    x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    dim = wrap_dim(dim, x.ndim)
    if k == 0 or x.size == 0:
        shape = (*x.shape[:dim], k, *x.shape[dim + 1 :])
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, np.int64)
    keys = jnp.moveaxis(x, dim, -1)
    if jnp.issubdtype(x.dtype, jnp.floating):
        # XLA orders NaNs by their sign bit; torch has all of them as the greatest.
        keys = jnp.where(jnp.isnan(keys), jnp.asarray(jnp.nan, x.dtype), keys)
        reverse = jnp.negative
    else:
        keys = keys.astype(np.uint8) if x.dtype.kind == "b" else keys
        reverse = jnp.invert  # unlike negation it has no overflow
    select = lambda keys: tuple(lax.top_k(keys, k))
    values, positions = per_slice(select, x.ndim - 1, keys if largest else reverse(keys))
    values = (values if largest else reverse(values)).astype(x.dtype)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(positions, -1, dim).astype(np.int64)


# Search --------------------------------------------------------------------------------------


@lowers("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    sorted_sequence: jax.Array,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    if sorter is not None:
        sorted_sequence = gather(sorted_sequence, -1, sorter)
    sequence, x = promote(sorted_sequence, x)
    dtype = np.int32 if out_int32 else np.int64
    if sequence.shape[-1] == 0 or x.size == 0:
        return jnp.zeros(x.shape, dtype)
    search = lambda line, values: jnp.searchsorted(
        line, values, side=side or ("right" if right else "left")
    )
    for _ in range(sequence.ndim - 1):
        search = jax.vmap(search)
    return search(sequence, x).astype(dtype)


@lowers("bucketize.Tensor", "bucketize.Scalar")
def bucketize(
    x: Any, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False
) -> jax.Array:
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


# ------------------------------------------------------------------------- order statistics


def _kth(x: jax.Array, k: Any, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    """The values of rank ``k`` (a number, or an array with size 1 along ``dim``), and where."""
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    order = jnp.argsort(x, axis=dim, stable=True)  # NaNs last
    k = jnp.broadcast_to(k, [1 if d == dim % x.ndim else n for d, n in enumerate(x.shape)])
    index = jnp.take_along_axis(order, k, axis=dim)
    value = jnp.take_along_axis(x, index, axis=dim)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


@lowers("kthvalue")
def kthvalue(x, k, dim=-1, keepdim=False):
    return _kth(x, k - 1, dim, keepdim)


@lowers("median.dim")
def median(x, dim, keepdim=False):
    if x.ndim == 0:
        return _kth(x, 0, dim, keepdim)
    rank = jnp.asarray((x.shape[dim] - 1) // 2)
    if not is_integral(x):
        # One NaN makes the median NaN: the first, in the order that puts NaNs last.
        is_nan = jnp.isnan(x)
        first_nan = x.shape[dim] - jnp.sum(is_nan, axis=dim, keepdims=True)
        rank = jnp.where(jnp.any(is_nan, axis=dim, keepdims=True), first_nan, rank)
    return _kth(x, rank, dim, keepdim)


@lowers("nanmedian.dim")
def nanmedian(x, dim, keepdim=False):
    if x.ndim == 0 or is_integral(x):
        return median(x, dim, keepdim)
    valid = jnp.sum(~jnp.isnan(x), axis=dim, keepdims=True)
    return _kth(x, jnp.maximum(valid - 1, 0) // 2, dim, keepdim)


@lowers("mode")
def mode(x, dim=-1, keepdim=False):
    """The most frequent value, the smallest of several, and its last position."""
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    ordered = jnp.sort(x, axis=dim)
    index = jax.lax.broadcasted_iota(np.int64, x.shape, dim % x.ndim)
    before = jnp.roll(ordered, 1, axis=dim)
    starts = jnp.where((index == 0) | (ordered != before), index, 0)
    run = index - jax.lax.cummax(starts, axis=dim % x.ndim)  # position within its run of equals
    best = jnp.argmax(run, axis=dim, keepdims=True)
    value = jnp.take_along_axis(ordered, best, axis=dim)
    where = jnp.max(jnp.where(x == value, index, 0), axis=dim, keepdims=True)
    return (value, where) if keepdim else (value.squeeze(dim), where.squeeze(dim))


@lowers("median.default")
def median_all(x):
    return jnp.asarray(jnp.nan, x.dtype) if x.size == 0 else median(x.reshape(-1), 0)[0]


@lowers("nanmedian.default")
def nanmedian_all(x):
    return jnp.asarray(jnp.nan, x.dtype) if x.size == 0 else nanmedian(x.reshape(-1), 0)[0]
