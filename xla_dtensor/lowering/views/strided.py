"""Views by strides and of windows, which may have an element of their base several times."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.lowering.dims import along, wrap_dim
from xla_dtensor.lowering.partitioned.scatter import write
from xla_dtensor.lowering.partitioned.strided import strided_slice
from xla_dtensor.lowering.registry import lowers_view


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
        positions = positions + along(jnp.arange(n, dtype=np.int64) * step, dim, len(size))
    return jnp.broadcast_to(positions, tuple(size))


def put_strided(
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


@lowers_view("as_strided", put=put_strided, repeats=_strided_repeats, greatest=_greatest_strided)
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
    return jnp.where(along(jnp.asarray(source >= 0), dim, base.ndim), taken, base)


def _windows_overlap(shape: Sequence[int], dimension: int, size: int, step: int) -> bool:
    return bool(shape) and step < size < shape[wrap_dim(dimension, len(shape))]


def over_each_position(
    windows: jax.Array, shape: Sequence[int], dim: int, size: int, step: int
) -> jax.Array:
    """What the windows over each position of ``dim`` have there, in a dim before ``dim``; zeros
    where there are fewer. Gathered, not scattered as by the transpose of `unfold`
    (`base/xla_faults.py:WINDOWS`)."""
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
    return jnp.max(over_each_position(values, shape, dim, size, step), axis=dim)


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
