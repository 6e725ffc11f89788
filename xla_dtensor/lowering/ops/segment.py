"""Reductions of consecutive segments of a dim, by the segment that each element is in."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.lowering.partitioned.cut import cut
from xla_dtensor.lowering.partitioned.gather import read_at
from xla_dtensor.lowering.partitioned.scatter import write
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers

_NAMES = {"amax": "max", "amin": "min"}  # torch takes both
_IDENTITY = {"sum": 0, "mean": 0, "prod": 1, "max": -jnp.inf, "min": jnp.inf}
_METHODS = {"sum": "add", "mean": "add", "prod": "multiply", "max": "max", "min": "min"}


@dataclass(frozen=True)
class _Segments:
    """Which elements of a dim belong together.

    Attributes:
        ids: ``[..., elements]``: the segment of each element, and the number of segments where it
            is in none.
        sizes: ``[..., segments, 1...]``: their lengths, as many dims as the data.
    """

    ids: jax.Array
    sizes: jax.Array

    def reduced(self, data: jax.Array, start: jax.Array, reduce: str) -> jax.Array:
        """``[..., segments, rest]`` of data ``[..., elements, rest]``: each segment's elements
        combined, and with ``start``, which is broadcast."""
        lead = self.ids.ndim - 1
        shape = (*data.shape[:lead], self.sizes.shape[lead], *data.shape[lead + 1 :])
        base = jnp.broadcast_to(jnp.asarray(start, data.dtype), shape)
        return write(base, self._places(), _METHODS[reduce], data)

    def to_elements(self, values: jax.Array) -> jax.Array:
        """``[..., elements, rest]`` of values of the segments; 0 where an element is in none."""
        shape = self.ids.shape
        if values.size == 0:
            return jnp.zeros((*shape, *values.shape[len(shape) :]), values.dtype)
        inside = (self.ids < values.shape[len(shape) - 1]).reshape(*shape, *self._ones())
        return jnp.where(inside, read_at(values, 0, self._places()), 0)

    def _places(self) -> list[jax.Array]:
        shape = self.ids.shape
        batch = [lax.broadcasted_iota(np.int32, shape, d) for d in range(len(shape) - 1)]
        return [*batch, self.ids]

    def _ones(self) -> tuple[int, ...]:
        return (1,) * (self.sizes.ndim - self.ids.ndim)


def _segments(
    data: jax.Array, lengths: jax.Array | None, offsets: jax.Array | None, axis: int
) -> _Segments:
    """From lengths ``[..., segments]`` or offsets ``[..., segments + 1]``."""
    if offsets is None:
        assert lengths is not None
        ends = jnp.cumsum(lengths, -1)
        starts = ends - lengths
    else:
        ends = offsets[..., 1:]
        starts = cut(offsets, [0] * offsets.ndim, ends.shape)
    *lead, segments = ends.shape
    # How many segments have ended before an element: marks at their ends, summed up.
    elements = data.shape[axis]
    batch = [lax.broadcasted_iota(np.int32, ends.shape, d) for d in range(len(lead))]
    marks = jnp.zeros((*lead, elements), np.int32)
    ids = jnp.cumsum(write(marks, [*batch, ends], "add", jnp.ones(ends.shape, np.int32)), -1)
    if segments:
        first = cut(starts, [0] * starts.ndim, (*lead, 1))
        ids = jnp.where(jnp.arange(elements) < first, segments, ids)
    ones = (1,) * (data.ndim - axis - 1)
    return _Segments(ids, (ends - starts).reshape(*ends.shape, *ones))


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
    reduce = _NAMES.get(reduce, reduce)
    data = data.astype(math_dtype(data.dtype))
    segments = _segments(data, lengths, offsets, axis % data.ndim)
    start = _IDENTITY[reduce] if initial is None else initial
    out = segments.reduced(data, jnp.asarray(start, data.dtype), reduce)
    if reduce == "mean":
        empty = jnp.nan if initial is None else initial
        out = jnp.where(segments.sizes == 0, empty, out / jnp.maximum(segments.sizes, 1))
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
    reduce = _NAMES.get(reduce, reduce)
    grad, output, data = (x.astype(math_dtype(data.dtype)) for x in (grad, output, data))
    segments = _segments(data, lengths, offsets, axis % data.ndim)
    to_elements = segments.to_elements
    zero_of = jnp.zeros((), data.dtype)
    if reduce == "sum":
        return to_elements(grad)
    if reduce == "mean":
        return to_elements(grad / jnp.maximum(segments.sizes, 1))
    if reduce in ("max", "min"):
        # Shared by all elements that are the extremum.
        mine = jnp.isnan(data) | (data == to_elements(output))
        count = segments.reduced(mine.astype(data.dtype), zero_of, "sum")
        return jnp.where(mine, to_elements(grad / jnp.maximum(count, 1)), 0)
    # The product of the other elements: not the quotient where the element is 0 or NaN.
    zero, nan = data == 0, jnp.isnan(data)
    start = jnp.asarray(1 if initial is None else initial, data.dtype)
    regular = to_elements(segments.reduced(jnp.where(zero | nan, 1, data), start, "prod"))
    zeros = to_elements(segments.reduced(zero.astype(data.dtype), zero_of, "sum"))
    nans = to_elements(segments.reduced(nan.astype(data.dtype), zero_of, "sum"))
    others = jnp.where(zeros - zero > 0, 0, regular)
    others = jnp.where(nans - nan > 0, jnp.nan, others)
    quotient = to_elements(grad * output) / jnp.where(zero | nan, 1, data)
    return jnp.where(zero | nan, to_elements(grad) * others, quotient)
