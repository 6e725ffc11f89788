"""Reductions of consecutive segments of a dim.

Each segment is reduced over the whole dim with the elements of the others masked: the shapes are
then static, and no scatter is needed. The work is segments times elements.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xla_dtensor.lowering.partitioned.cut import cut
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers

_IDENTITY = {"sum": 0, "mean": 0, "prod": 1, "max": -jnp.inf, "min": jnp.inf}


def _membership(
    data: jax.Array, lengths: jax.Array | None, offsets: jax.Array | None, axis: int
) -> tuple[jax.Array, jax.Array]:
    """``[..., segments, elements, 1...]``, whether an element is in a segment, and the lengths
    ``[..., segments, 1...]``, both as many dims as ``data`` and one more, and as ``data``."""
    if offsets is None:
        assert lengths is not None
        ends = jnp.cumsum(lengths, -1)
        starts = ends - lengths
    else:
        ends = offsets[..., 1:]
        starts = cut(offsets, [0] * offsets.ndim, ends.shape)
    index = jnp.arange(data.shape[axis])
    inside = (starts[..., None] <= index) & (index < ends[..., None])
    rest = (1,) * (data.ndim - axis - 1)
    sizes = (ends - starts).reshape(*starts.shape, *rest)
    return inside.reshape(*inside.shape, *rest), sizes


@lowers("segment_reduce", static_scalars=True)
def segment_reduce(
    data: jax.Array,
    reduce: str,
    *,
    lengths: jax.Array | None = None,
    indices: jax.Array | None = None,
    offsets: jax.Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> jax.Array:
    axis %= data.ndim
    data = data.astype(math_dtype(data.dtype))
    inside, sizes = _membership(data, lengths, offsets, axis)
    start = _IDENTITY[reduce] if initial is None else initial
    values = jnp.where(inside, jnp.expand_dims(data, axis), _IDENTITY[reduce])
    if reduce in ("sum", "mean"):
        out = jnp.sum(values, axis + 1) + start
    elif reduce == "prod":
        out = jnp.prod(values, axis + 1) * start
    else:
        extremum, combine = (jnp.max, jnp.maximum) if reduce == "max" else (jnp.min, jnp.minimum)
        identity = jnp.asarray(_IDENTITY[reduce], data.dtype)
        out = combine(extremum(values, axis + 1, initial=identity), start)
    if reduce == "mean":
        empty = jnp.nan if initial is None else initial
        out = jnp.where(sizes == 0, empty, out / jnp.maximum(sizes, 1))
    return out


@lowers("_segment_reduce_backward", static_scalars=True)
def segment_reduce_backward(
    grad: jax.Array,
    output: jax.Array,
    data: jax.Array,
    reduce: str,
    *,
    lengths: jax.Array | None = None,
    offsets: jax.Array | None = None,
    axis: int = 0,
    initial: float | None = None,
) -> jax.Array:
    axis %= data.ndim
    grad, output, data = (x.astype(math_dtype(data.dtype)) for x in (grad, output, data))
    inside, sizes = _membership(data, lengths, offsets, axis)

    def to_elements(per_segment: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(inside, jnp.expand_dims(per_segment, axis + 1), 0), axis)

    def per_segment(reduction: Any, values: jax.Array, identity: Any) -> jax.Array:
        return reduction(jnp.where(inside, jnp.expand_dims(values, axis), identity), axis + 1)

    if reduce == "sum":
        return to_elements(grad)
    if reduce == "mean":
        return to_elements(grad / jnp.maximum(sizes, 1))
    if reduce in ("max", "min"):
        # Shared by all elements that are the extremum.
        mine = jnp.isnan(data) | (data == to_elements(output))
        count = per_segment(jnp.sum, mine.astype(data.dtype), 0)
        return jnp.where(mine, to_elements(grad / jnp.maximum(count, 1)), 0)
    # The product of the other elements: not the quotient where the element is 0 or NaN.
    zero, nan = data == 0, jnp.isnan(data)
    start = 1 if initial is None else initial
    regular = to_elements(per_segment(jnp.prod, jnp.where(zero | nan, 1, data), 1) * start)
    zeros = to_elements(per_segment(jnp.sum, zero.astype(data.dtype), 0))
    nans = to_elements(per_segment(jnp.sum, nan.astype(data.dtype), 0))
    others = jnp.where(zeros - zero > 0, 0, regular)
    others = jnp.where(nans - nan > 0, jnp.nan, others)
    quotient = to_elements(grad * output) / jnp.where(zero | nan, 1, data)
    return jnp.where(zero | nan, to_elements(grad) * others, quotient)
