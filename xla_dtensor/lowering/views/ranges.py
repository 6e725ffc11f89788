"""Views of some positions of a dim: slices, single positions, pieces, diagonals.

The writes are phrased so that XLA partitions them without gathering the base: a padded value and a
mask for a range, a dynamic-update-slice for a single position (which also stays in place in a
donated buffer).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.lowering.dims import along, wrap_dim
from xla_dtensor.lowering.partitioned.gather import read_at
from xla_dtensor.lowering.partitioned.padding import padded
from xla_dtensor.lowering.partitioned.strided import spread, strided_slice
from xla_dtensor.lowering.registry import lowers_view

# Ranges of a dim -----------------------------------------------------------------------------


def slice_bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """The start and end of a torch slice of a dim, clamped to it as torch does."""
    start = 0 if start is None else start
    end = size if end is None else end
    start = min(max(start + size if start < 0 else start, 0), size)
    end = min(max(end + size if end < 0 else end, start), size)
    return start, end


def _put_range(
    base: jax.Array, value: jax.Array, dim: int, start: int, length: int, step: int = 1
) -> jax.Array:
    """``base`` with ``length`` positions of ``dim`` from ``start`` on replaced by ``value``."""
    shape = (*base.shape[:dim], length, *base.shape[dim + 1 :])
    value = jnp.broadcast_to(value.astype(base.dtype), shape)
    if value.size == 0 or value.size == base.size:
        return value if value.size else base
    size = base.shape[dim]
    if length == 1:
        # As 32 bits, which JAX also lowers where its 64-bit types are off (under vmap, a scatter).
        at = np.int32(start) if isinstance(start, int) and size < 2**31 else start
        return lax.dynamic_update_slice_in_dim(base, value, at, dim)
    # A range written by dynamic-update-slice makes XLA gather a base sharded in `dim`.
    written = np.zeros(size, bool)
    written[start : start + (length - 1) * step + 1 : step] = True
    values = spread(value, dim, start, step, size)
    return jnp.where(along(jnp.asarray(written), dim, base.ndim), values, base)


def put_slice(
    base: jax.Array,
    value: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    dim = wrap_dim(dim, base.ndim)
    start, end = slice_bounds(base.shape[dim], start, end)
    return _put_range(base, value, dim, start, len(range(start, end, step)), step)


@lowers_view("slice.Tensor", put=put_slice)
def slice_(
    base: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    dim = wrap_dim(dim, base.ndim)
    start, end = slice_bounds(base.shape[dim], start, end)
    count = len(range(start, end, step))
    if not count:
        return lax.slice_in_dim(base, start, start, axis=dim)
    return strided_slice(base, dim, start, count, step)


def put_select(base: jax.Array, value: jax.Array, dim: int, index: int) -> jax.Array:
    dim = wrap_dim(dim, base.ndim)
    rest = (*base.shape[:dim], *base.shape[dim + 1 :])
    value = jnp.expand_dims(jnp.broadcast_to(value, rest), dim)
    return _put_range(base, value, dim, index % base.shape[dim], 1)


@lowers_view("select.int", put=put_select)
def select(base: jax.Array, dim: int, index: int) -> jax.Array:
    dim = wrap_dim(dim, base.ndim)
    return lax.squeeze(strided_slice(base, dim, index % base.shape[dim], 1, 1), [dim])


def _put_unbound(base: jax.Array, value: jax.Array, index: int, dim: int = 0) -> jax.Array:
    return put_select(base, value, dim, index)


@lowers_view("unbind.int", put=_put_unbound)
def unbind(base: jax.Array, dim: int = 0) -> tuple[jax.Array, ...]:
    dim = wrap_dim(dim, base.ndim)
    return tuple(select(base, dim, i) for i in range(base.shape[dim]))


def _chunk_sizes(size: int, chunk: int) -> list[int]:
    if size == 0 or chunk == 0:
        return [size]
    return [min(chunk, size - start) for start in range(0, size, chunk)]


def _put_split(
    base: jax.Array, value: jax.Array, index: int, split_size: int, dim: int = 0
) -> jax.Array:
    dim = wrap_dim(dim, base.ndim)
    return _put_split_sizes(base, value, index, _chunk_sizes(base.shape[dim], split_size), dim)


@lowers_view("split.Tensor", "unsafe_split.Tensor", put=_put_split)
def split(base: jax.Array, split_size: int, dim: int = 0) -> tuple[jax.Array, ...]:
    dim = wrap_dim(dim, base.ndim)
    return split_with_sizes(base, _chunk_sizes(base.shape[dim], split_size), dim)


def _put_split_sizes(
    base: jax.Array, value: jax.Array, index: int, split_sizes: Sequence[int], dim: int = 0
) -> jax.Array:
    dim = wrap_dim(dim, base.ndim)
    return _put_range(base, value, dim, sum(split_sizes[:index]), split_sizes[index])


@lowers_view("split_with_sizes", "unsafe_split_with_sizes", put=_put_split_sizes)
def split_with_sizes(
    base: jax.Array, split_sizes: Sequence[int], dim: int = 0
) -> tuple[jax.Array, ...]:
    ends = map(int, np.cumsum(split_sizes))
    return tuple(
        slice_(base, dim, end - size, end) for size, end in zip(split_sizes, ends, strict=True)
    )


# Diagonals -----------------------------------------------------------------------------------


def _diagonal_start(rows: int, cols: int, offset: int) -> tuple[int, int, int]:
    """First row, first column and length of a diagonal."""
    row, col = max(-offset, 0), max(offset, 0)
    return row, col, max(min(rows - row, cols - col), 0)


def put_diagonal(
    base: jax.Array, value: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    dim1, dim2 = wrap_dim(dim1, base.ndim), wrap_dim(dim2, base.ndim)
    matrix = jnp.moveaxis(base, (dim1, dim2), (-2, -1))
    rows, cols = matrix.shape[-2:]
    row, _, length = _diagonal_start(rows, cols, offset)
    if length == 0:
        return base
    value = jnp.broadcast_to(value.astype(base.dtype), (*matrix.shape[:-2], length))
    # A mask instead of a scatter: it partitions like any pointwise op.
    widths = [(0, 0)] * (value.ndim - 1) + [(row, rows - row - length)]
    by_row = padded(value, widths)[..., None]
    on_diagonal = jnp.arange(cols) - jnp.arange(rows)[:, None] == offset
    return jnp.moveaxis(jnp.where(on_diagonal, by_row, matrix), (-2, -1), (dim1, dim2))


@lowers_view("diagonal", put=put_diagonal)
def diagonal(base: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    matrix = jnp.moveaxis(base, (dim1, dim2), (-2, -1))
    rows, cols = matrix.shape[-2:]
    row, col, length = _diagonal_start(rows, cols, offset)
    step = jnp.arange(length)
    return read_at(matrix, matrix.ndim - 2, [row + step, col + step])
