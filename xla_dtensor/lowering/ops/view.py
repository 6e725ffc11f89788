"""Views, their `*_scatter` and `*_copy` forms, and their backwards.

For each view, `get` reads it from its base and `put` writes it back. The writes are phrased so that
XLA partitions them without gathering the base: a padded value and a mask for a range, a
dynamic-update-slice for a single position (which also stays in place in a donated buffer).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.lowering.partitioned.gather import read_at
from xla_dtensor.lowering.partitioned.padding import padded
from xla_dtensor.lowering.partitioned.scatter import write
from xla_dtensor.lowering.partitioned.strided import spread, strided_slice
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import ViewLowering, lowers, lowers_view


def wrap_dim(dim: int, ndim: int) -> int:
    """``dim`` as a non-negative index; a 0-d tensor counts as having one dim, as in torch."""
    return dim % max(ndim, 1)


# Reshapes ------------------------------------------------------------------------------------


def _put_reshaped(base: jax.Array, value: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    return value.astype(base.dtype).reshape(base.shape)


@lowers_view("alias", "detach", "lift_fresh", put=_put_reshaped)
def alias(base: jax.Array) -> jax.Array:
    return base


@lowers_view("view", "_reshape_alias", "_unsafe_view", put=_put_reshaped)
def view(base: jax.Array, size: Sequence[int], stride: Any = None) -> jax.Array:
    return base.reshape(_infer_size(size, base.size))


def _infer_size(size: Sequence[int], numel: int) -> list[int]:
    """``size`` with its -1 filled in (JAX refuses -1 for empty arrays)."""
    if -1 not in size:
        return list(size)
    rest = math.prod(s for s in size if s != -1)
    return [numel // max(rest, 1) if s == -1 else s for s in size]


@lowers_view("squeeze", put=_put_reshaped)
def squeeze(base: jax.Array) -> jax.Array:
    return base.reshape([s for s in base.shape if s != 1])


@lowers_view("squeeze.dim", "squeeze.dims", put=_put_reshaped)
def squeeze_dims(base: jax.Array, dim: int | Sequence[int]) -> jax.Array:
    dims = [dim] if isinstance(dim, int) else dim
    dropped = {wrap_dim(d, base.ndim) for d in dims}
    return base.reshape([s for d, s in enumerate(base.shape) if s != 1 or d not in dropped])


@lowers_view("unsqueeze", put=_put_reshaped)
def unsqueeze(base: jax.Array, dim: int) -> jax.Array:
    return jnp.expand_dims(base, dim)


# Permutations --------------------------------------------------------------------------------


def _put_permuted(base: jax.Array, value: jax.Array, dims: Sequence[int]) -> jax.Array:
    inverse = np.argsort([wrap_dim(d, base.ndim) for d in dims])
    return value.astype(base.dtype).transpose([int(d) for d in inverse])


@lowers_view("permute", put=_put_permuted)
def permute(base: jax.Array, dims: Sequence[int]) -> jax.Array:
    return base.transpose([wrap_dim(d, base.ndim) for d in dims])


def _put_transposed(base: jax.Array, value: jax.Array, dim0: int = 0, dim1: int = -1) -> jax.Array:
    return transpose(value.astype(base.dtype), dim0, dim1)


@lowers_view("transpose.int", put=_put_transposed)
def transpose(base: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return jnp.swapaxes(base, dim0, dim1) if base.ndim else base


@lowers_view("t", put=_put_transposed)
def t(base: jax.Array) -> jax.Array:
    return base.T


# Elements seen as another type ---------------------------------------------------------------


def _bits(x: jax.Array) -> jax.Array:
    """``x`` with types that XLA cannot bitcast replaced by ones with the same bytes."""
    if x.dtype.kind == "b":
        return x.astype(np.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return view_as_real(x).reshape(*x.shape[:-1], -1) if x.ndim else view_as_real(x)
    return x


def _reinterpret(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """The bytes of ``x`` read as ``dtype``; the last dim grows or shrinks with the item size."""
    if x.dtype == dtype:
        return x
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        parts = _reinterpret(x, part)
        if x.dtype.itemsize == dtype.itemsize and x.ndim == 0:
            return view_as_complex(parts.reshape(2))
        return view_as_complex(parts.reshape(*x.shape[:-1], -1, 2))
    if dtype.kind == "b":
        return _reinterpret(x, np.dtype(np.uint8)) != 0
    source = _bits(x)
    old, new = source.dtype.itemsize, dtype.itemsize
    shape = source.shape
    if old == new:
        out = lax.bitcast_convert_type(source, dtype)
    elif old > new:  # adds a dim of old // new
        out = lax.bitcast_convert_type(source, dtype)
        shape = (*shape[:-1], shape[-1] * (old // new)) if shape else (old // new,)
    else:  # consumes a last dim of new // old
        shape = (*shape[:-1], shape[-1] // (new // old))
        out = lax.bitcast_convert_type(source.reshape(*shape, new // old), dtype)
    if x.ndim == 0 and x.dtype.itemsize == dtype.itemsize:
        shape = ()
    return out.reshape(shape)


def _put_dtype(base: jax.Array, value: jax.Array, dtype: torch.dtype) -> jax.Array:
    return _reinterpret(value.astype(to_jax_dtype(dtype)), base.dtype).reshape(base.shape)


@lowers_view("view.dtype", put=_put_dtype)
def view_dtype(base: jax.Array, dtype: torch.dtype) -> jax.Array:
    return _reinterpret(base, to_jax_dtype(dtype))


def _put_as_real(base: jax.Array, value: jax.Array) -> jax.Array:
    return lax.complex(value[..., 0], value[..., 1]).astype(base.dtype)


@lowers_view("view_as_real", put=_put_as_real)
def view_as_real(base: jax.Array) -> jax.Array:
    return jnp.stack([base.real, base.imag], axis=-1)


def _put_as_complex(base: jax.Array, value: jax.Array) -> jax.Array:
    return view_as_real(value).astype(base.dtype)


@lowers_view("view_as_complex", put=_put_as_complex)
def view_as_complex(base: jax.Array) -> jax.Array:
    return lax.complex(base[..., 0], base[..., 1])


def _put_conj(base: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.conj(value).astype(base.dtype)


@lowers_view("_conj", put=_put_conj)
def conj(base: jax.Array) -> jax.Array:
    return jnp.conj(base)


def _put_neg(base: jax.Array, value: jax.Array) -> jax.Array:
    return (-value).astype(base.dtype)


@lowers_view("_neg_view", put=_put_neg)
def neg_view(base: jax.Array) -> jax.Array:
    return -base


# Expansion -----------------------------------------------------------------------------------


def _expands(shape: Sequence[int], size: Sequence[int], implicit: bool = False) -> bool:
    return math.prod(_expanded(shape, size)) > math.prod(shape)


def _expanded(shape: Sequence[int], size: Sequence[int]) -> list[int]:
    new = len(size) - len(shape)
    return [s if s != -1 or d < new else shape[d - new] for d, s in enumerate(size)]


def _greatest_expanded(
    values: jax.Array, shape: Sequence[int], size: Sequence[int], implicit: bool = False
) -> jax.Array:
    added = values.ndim - len(shape)
    repeated = [d for d, n in enumerate(shape, added) if n == 1]
    return jnp.max(values, axis=(*range(added), *repeated)).reshape(tuple(shape))


def _put_expanded(
    base: jax.Array, value: jax.Array, size: Sequence[int], implicit: bool = False
) -> jax.Array:
    return value.astype(base.dtype).reshape(base.shape) if value.size else base


@lowers_view("expand", put=_put_expanded, repeats=_expands, greatest=_greatest_expanded)
def expand(base: jax.Array, size: Sequence[int], implicit: bool = False) -> jax.Array:
    return jnp.broadcast_to(base, _expanded(base.shape, size))


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
    if length == 1:
        return lax.dynamic_update_slice_in_dim(base, value, start, dim)
    # A range written by dynamic-update-slice makes XLA gather a base sharded in `dim`.
    size = base.shape[dim]
    written = np.zeros(size, bool)
    written[start : start + (length - 1) * step + 1 : step] = True
    values = spread(value, dim, start, step, size)
    return jnp.where(_along(written, dim, base.ndim), values, base)


def _along(values: Any, dim: int, ndim: int) -> jax.Array:
    """The 1-d ``values`` shaped to broadcast along ``dim``."""
    return jnp.asarray(values).reshape([-1 if d == dim else 1 for d in range(ndim)])


def _put_slice(
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


@lowers_view("slice.Tensor", put=_put_slice)
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


def _put_select(base: jax.Array, value: jax.Array, dim: int, index: int) -> jax.Array:
    dim = wrap_dim(dim, base.ndim)
    rest = (*base.shape[:dim], *base.shape[dim + 1 :])
    value = jnp.expand_dims(jnp.broadcast_to(value, rest), dim)
    return _put_range(base, value, dim, index % base.shape[dim], 1)


@lowers_view("select.int", put=_put_select)
def select(base: jax.Array, dim: int, index: int) -> jax.Array:
    dim = wrap_dim(dim, base.ndim)
    return lax.squeeze(strided_slice(base, dim, index % base.shape[dim], 1, 1), [dim])


def _put_unbound(base: jax.Array, value: jax.Array, index: int, dim: int = 0) -> jax.Array:
    return _put_select(base, value, dim, index)


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


def _put_diagonal(
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


@lowers_view("diagonal", put=_put_diagonal)
def diagonal(base: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    matrix = jnp.moveaxis(base, (dim1, dim2), (-2, -1))
    rows, cols = matrix.shape[-2:]
    row, col, length = _diagonal_start(rows, cols, offset)
    step = jnp.arange(length)
    return read_at(matrix, matrix.ndim - 2, [row + step, col + step])


# Strides and windows -------------------------------------------------------------------------


def _dense_permutation(
    numel: int, size: Sequence[int], stride: Sequence[int], offset: int
) -> list[int] | None:
    """The order of dims in which ``stride`` walks all of a base of ``numel`` elements
    contiguously, or None where it does not."""
    if offset or math.prod(size) != numel:
        return None
    order = sorted(range(len(size)), key=lambda d: (stride[d], size[d]), reverse=True)
    expected = 1
    for d in reversed(order):
        if size[d] != 1 and stride[d] != expected:
            return None
        expected *= size[d]
    return order


def overlaps(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of a strided view share memory; of a large one that is hard to tell: whether
    they may."""
    reach, dense = 0, True
    for step, n in sorted(zip(stride, size, strict=True)):
        if n > 1:
            dense &= step > reach
            reach += step * (n - 1)
    if dense or 0 in size:
        return False
    numel = math.prod(size)
    if numel > reach + 1 or numel > _FEW:
        return True
    places = np.zeros((), np.int64)
    for n, step in zip(size, stride, strict=True):
        places = places[..., None] + np.arange(n) * step
    return len(np.unique(places)) < numel


_FEW = 1 << 20  # elements that are counted in a few milliseconds


def _strided_positions(
    numel: int, size: Sequence[int], stride: Sequence[int], offset: int
) -> jax.Array:
    """The flat position in the base of each element of the view. Computed by XLA from iotas: as a
    constant it would be as large as the view."""
    last = offset + sum(step * (n - 1) for step, n in zip(stride, size, strict=True))
    if math.prod(size) and last >= numel:
        raise ValueError(
            f"as_strided: size {list(size)}, stride {list(stride)} and offset {offset} reach "
            f"element {last} of a tensor with {numel} elements"
        )
    positions = jnp.full((1,) * len(size), offset, np.int64)
    for dim, (n, step) in enumerate(zip(size, stride, strict=True)):
        positions = positions + _along(jnp.arange(n, dtype=np.int64) * step, dim, len(size))
    return jnp.broadcast_to(positions, tuple(size))


def _put_strided(
    base: jax.Array,
    value: jax.Array,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> jax.Array:
    value = jnp.broadcast_to(value.astype(base.dtype), tuple(size))
    if value.size == 0:
        return base
    offset = storage_offset or 0
    order = _dense_permutation(base.size, size, stride, offset)
    if order is not None:
        return value.transpose(order).reshape(base.shape)
    if overlaps(size, stride):
        raise UnsupportedOpError(
            f"as_strided_scatter with size {list(size)} and stride {list(stride)}: several elements"
            " of the source go to one place, and torch leaves open which of them stays"
        )
    positions = _strided_positions(base.size, size, stride, offset).reshape(-1)
    return write(base.reshape(-1), (positions,), "set", value.reshape(-1)).reshape(base.shape)


def _strided_repeats(
    shape: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> bool:
    return overlaps(size, stride)


def _greatest_strided(
    values: jax.Array,
    shape: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> jax.Array:
    repeated = [d for d, step in enumerate(stride) if step == 0]
    values = jnp.max(values, axis=repeated)
    size = [n for n, step in zip(size, stride, strict=True) if step]
    stride = [step for step in stride if step]
    positions = _strided_positions(math.prod(shape), size, stride, storage_offset or 0)
    flat = jnp.zeros(math.prod(shape), values.dtype)
    return write(flat, (positions.reshape(-1),), "max", values.reshape(-1)).reshape(tuple(shape))


@lowers_view("as_strided", put=_put_strided, repeats=_strided_repeats, greatest=_greatest_strided)
def as_strided(
    base: jax.Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> jax.Array:
    offset = storage_offset or 0
    order = _dense_permutation(base.size, size, stride, offset)
    if order is not None:
        return base.reshape([size[d] for d in order]).transpose([int(d) for d in np.argsort(order)])
    positions = _strided_positions(base.size, size, stride, offset)
    if positions.size == 0:
        return jnp.zeros(tuple(size), base.dtype)
    return base.reshape(-1).at[positions].get(mode="promise_in_bounds")


def _window_positions(length: int, size: int, step: int) -> np.ndarray:
    count = (length - size) // step + 1
    return np.arange(count)[:, None] * step + np.arange(size)


def _put_unfolded(
    base: jax.Array, value: jax.Array, dimension: int, size: int, step: int
) -> jax.Array:
    value = value.astype(base.dtype)
    if base.ndim == 0 or value.size == 0:
        return value.reshape(()) if value.size else base
    dim = wrap_dim(dimension, base.ndim)
    positions = _window_positions(base.shape[dim], size, step)
    source = np.full(base.shape[dim], -1)
    source[positions.reshape(-1)] = np.arange(positions.size)
    value = jnp.moveaxis(value, -1, dim + 1)
    flat = value.reshape(*base.shape[:dim], positions.size, *base.shape[dim + 1 :])
    taken = jnp.take(flat, np.maximum(source, 0), axis=dim, mode="clip")
    return jnp.where(_along(source >= 0, dim, base.ndim), taken, base)


def _windows_overlap(shape: Sequence[int], dimension: int, size: int, step: int) -> bool:
    return bool(shape) and step < size < shape[wrap_dim(dimension, len(shape))]


def _over_each_position(
    windows: jax.Array, shape: Sequence[int], dim: int, size: int, step: int
) -> jax.Array:
    """What the windows over each position of ``dim`` have there, in a dim before ``dim``; zeros
    where there are fewer. Gathered: XLA's partitioner aborts on some layouts of the scatter that
    transposing `unfold` would give."""
    covered = _window_positions(shape[dim], size, step).reshape(-1)
    order = np.argsort(covered, kind="stable")
    position = covered[order]
    number = np.arange(len(order)) - np.searchsorted(position, position)
    sources = np.full((number.max() + 1, shape[dim]), -1)
    sources[number, position] = order
    windows = jnp.moveaxis(windows, -1, dim + 1)
    flat = windows.reshape(*shape[:dim], len(order), *shape[dim + 1 :])
    taken = jnp.take(flat, np.maximum(sources, 0), axis=dim, mode="clip")
    used = (sources >= 0).reshape(sources.shape + (1,) * (len(shape) - dim - 1))
    return jnp.where(used, taken, jnp.zeros((), taken.dtype))


def _greatest_unfolded(
    values: jax.Array, shape: Sequence[int], dimension: int, size: int, step: int
) -> jax.Array:
    dim = wrap_dim(dimension, len(shape))
    return jnp.max(_over_each_position(values, shape, dim, size, step), axis=dim)


@lowers_view("unfold", put=_put_unfolded, repeats=_windows_overlap, greatest=_greatest_unfolded)
def unfold(base: jax.Array, dimension: int, size: int, step: int) -> jax.Array:
    if base.ndim == 0:
        return base.reshape(1)[:size]
    dim = wrap_dim(dimension, base.ndim)
    positions = _window_positions(base.shape[dim], size, step)
    if size == step:  # windows side by side: a reshape, which keeps the dim's sharding
        used = strided_slice(base, dim, 0, positions.size, 1)
        windows = used.reshape(*base.shape[:dim], *positions.shape, *base.shape[dim + 1 :])
    else:
        windows = jnp.take(base, positions, axis=dim, mode="clip")
    return jnp.moveaxis(windows, dim + 1, -1)


# Writes to views that have elements of their base several times ------------------------------


def put_changes(
    view: ViewLowering, base: jax.Array, value: jax.Array, size: int, args: Any, kwargs: Any
) -> jax.Array:
    """``base`` after its view, in which elements may be several times, has become ``value``.

    Only what has changed is put back: where one place of an element was written (to a row of an
    expanded tensor, one of several windows), the others still have what was there before.

    Args:
        size: the bytes that a write can have changed by themselves: of the narrowest type as which
            the view was looked at.
    """
    assert view.greatest is not None
    now = _patterns(value.astype(base.dtype), size)
    then = _patterns(view.get(base, *args, **kwargs), size)
    parts = []
    for own, new, old in zip(_patterns(base, size), now, then, strict=True):
        # All places that were written have the same difference, the rest has none.
        parts.append(own ^ view.greatest(new ^ old, base.shape, *args, **kwargs))
    return _of_patterns(parts, base.dtype)


def _patterns(x: jax.Array, size: int) -> list[jax.Array]:
    """The bits of ``x`` as unsigned integers of at most ``size`` bytes."""
    if x.dtype.kind == "c":
        return [*_patterns(x.real, size), *_patterns(x.imag, size)]
    if x.dtype.kind == "b":
        return [x.astype(np.uint8)]
    size = min(size, x.dtype.itemsize)
    bits = lax.bitcast_convert_type(x, np.dtype(f"u{size}"))
    return [bits] if bits.ndim == x.ndim else [bits[..., i] for i in range(bits.shape[-1])]


def _of_patterns(parts: list[jax.Array], dtype: np.dtype) -> jax.Array:
    """The inverse of `_patterns`."""
    if dtype.kind == "c":
        half, part = len(parts) // 2, np.dtype(f"f{dtype.itemsize // 2}")
        return lax.complex(_of_patterns(parts[:half], part), _of_patterns(parts[half:], part))
    if dtype.kind == "b":
        return parts[0].astype(bool)
    return lax.bitcast_convert_type(parts[0] if len(parts) == 1 else jnp.stack(parts, -1), dtype)


# Functional forms ----------------------------------------------------------------------------

_SCATTERS: dict[str, tuple[Callable[..., jax.Array], Callable[..., torch.Tensor]]] = {
    "slice_scatter": (_put_slice, torch.ops.aten.slice.Tensor),
    "select_scatter": (_put_select, torch.select),
    "diagonal_scatter": (_put_diagonal, torch.diagonal),
    "as_strided_scatter": (_put_strided, torch.as_strided),
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

_COPIES: dict[Callable[..., Any], tuple[str, ...]] = {
    alias: ("alias_copy", "detach_copy", "lift_fresh_copy"),
    view: ("view_copy", "_reshape_alias_copy", "_reshape_copy"),
    view_dtype: ("view_copy.dtype",),
    squeeze: ("squeeze_copy",),
    squeeze_dims: ("squeeze_copy.dim", "squeeze_copy.dims"),
    unsqueeze: ("unsqueeze_copy",),
    permute: ("permute_copy",),
    transpose: ("transpose_copy.int",),
    t: ("t_copy",),
    view_as_real: ("view_as_real_copy",),
    view_as_complex: ("view_as_complex_copy",),
    conj: ("_conj_copy",),
    neg_view: ("_neg_view_copy",),
    expand: ("expand_copy",),
    slice_: ("slice_copy.Tensor",),
    select: ("select_copy.int",),
    unbind: ("unbind_copy.int",),
    split: ("split_copy.Tensor",),
    split_with_sizes: ("split_with_sizes_copy",),
    diagonal: ("diagonal_copy",),
    unfold: ("unfold_copy",),
}
for _get, _names in _COPIES.items():
    lowers(*_names)(_get)


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
        base = jax.ShapeDtypeStruct(tuple(input_sizes), wide.dtype)
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
    return _over_each_position(wide, input_sizes, dim, size, step).sum(dim).astype(grad.dtype)


_BACKWARDS: dict[str, Callable[..., jax.Array]] = {
    "slice_backward": slice_,
    "select_backward": select,
    "diagonal_backward": diagonal,
}
for _name, _get in _BACKWARDS.items():
    lowers(_name, has_position=_get is not diagonal)(_transposed(_get))
