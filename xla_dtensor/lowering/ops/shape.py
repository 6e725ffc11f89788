"""Joining, padding, shuffling and sorting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.lowering.ops.view import wrap_dim
from xla_dtensor.lowering.partitioned.padding import padded
from xla_dtensor.lowering.partitioned.per_slice import per_slice
from xla_dtensor.lowering.promotion import math_dtype, promote
from xla_dtensor.lowering.registry import lowers

# Joining -------------------------------------------------------------------------------------


@lowers("cat")
def cat(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    arrays = promote(*tensors)
    # torch skips 1-d empty tensors, whatever the others' shapes.
    kept = [x for x in arrays if x.shape != (0,)] or list(arrays[:1])
    return lax.concatenate(kept, wrap_dim(dim, kept[0].ndim))


@lowers("stack", "_stack")
def stack(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    return jnp.stack(promote(*tensors), axis=dim)


# Padding -------------------------------------------------------------------------------------


def _pairs(pad: Sequence[int], ndim: int) -> list[tuple[int, int]]:
    """torch's padding list (last dim first) as (before, after) per dim."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


@lowers("constant_pad_nd")
def constant_pad_nd(x: jax.Array, pad: Sequence[int], value: Any = 0) -> jax.Array:
    return padded(x, _pairs(pad, x.ndim), value)


def _padding(mode: str) -> Callable[..., jax.Array]:
    def pad(x: jax.Array, padding: Sequence[int]) -> jax.Array:
        pairs = _pairs(padding, x.ndim)
        added = [(max(before, 0), max(after, 0)) for before, after in pairs]
        x = _edges_repeated(x, added) if mode == "edge" else jnp.pad(x, added, mode=mode)
        return padded(x, [(min(before, 0), min(after, 0)) for before, after in pairs])

    return pad


def _edges_repeated(x: jax.Array, added: Sequence[tuple[int, int]]) -> jax.Array:
    """`jnp.pad` with ``"edge"``, in slices: it repeats by a gather, and the transpose of that is a
    scatter, for which XLA gathers what is sharded."""
    for dim, (before, after) in enumerate(added):
        if before or after:
            size = x.shape[dim]
            pieces = [
                lax.slice_in_dim(x, 0, 1, axis=dim),
                x,
                lax.slice_in_dim(x, size - 1, size, axis=dim),
            ]
            for i, n in ((0, before), (2, after)):
                shape = [n if d == dim else own for d, own in enumerate(x.shape)]
                pieces[i] = jnp.broadcast_to(pieces[i], shape)
            x = lax.concatenate(pieces, dim)
    return x


def _padding_backward(mode: str) -> Callable[..., jax.Array]:
    def backward(grad: jax.Array, x: jax.Array, padding: Sequence[int]) -> jax.Array:
        wide = grad.astype(math_dtype(grad.dtype))
        padded = jax.ShapeDtypeStruct(x.shape, wide.dtype)
        return jax.linear_transpose(lambda x: _padding(mode)(x, padding), padded)(wide)[0]

    return backward


for _name, _mode in {"reflection": "reflect", "replication": "edge"}.items():
    lowers(*(f"{_name}_pad{n}d" for n in (1, 2, 3)))(_padding(_mode))
    lowers(*(f"{_name}_pad{n}d_backward" for n in (1, 2, 3)))(_padding_backward(_mode))


# Shuffling -----------------------------------------------------------------------------------


@lowers("pixel_shuffle")
def pixel_shuffle(x: jax.Array, upscale_factor: int) -> jax.Array:
    *batch, channels, height, width = x.shape
    f, n = upscale_factor, len(batch)
    x = x.reshape(*batch, channels // f**2, f, f, height, width)
    x = x.transpose(*range(n + 1), n + 3, n + 1, n + 4, n + 2)
    return x.reshape(*batch, channels // f**2, height * f, width * f)


@lowers("pixel_unshuffle")
def pixel_unshuffle(x: jax.Array, downscale_factor: int) -> jax.Array:
    *batch, channels, height, width = x.shape
    f, n = downscale_factor, len(batch)
    x = x.reshape(*batch, channels, height // f, f, width // f, f)
    x = x.transpose(*range(n + 1), n + 2, n + 4, n + 1, n + 3)
    return x.reshape(*batch, channels * f**2, height // f, width // f)


@lowers("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(x: jax.Array, groups: int) -> jax.Array:
    split = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return jnp.swapaxes(split, 1, 2).reshape(x.shape)


@lowers("rot90")
def rot90(x: jax.Array, k: int = 1, dims: Sequence[int] = (0, 1)) -> jax.Array:
    return jnp.rot90(x, k, tuple(dims))


# Sorting -------------------------------------------------------------------------------------


def _sorted(x: jax.Array, dim: int, descending: bool) -> tuple[jax.Array, jax.Array]:
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


@lowers("sort")
def sort(x: jax.Array, dim: int = -1, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    return _sorted(x, dim, descending)


@lowers("sort.stable")
def sort_stable(
    x: jax.Array, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _sorted(x, dim, descending)


@lowers("argsort")
def argsort(x: jax.Array, dim: int = -1, descending: bool = False) -> jax.Array:
    return _sorted(x, dim, descending)[1]


@lowers("argsort.stable")
def argsort_stable(
    x: jax.Array, *, stable: bool = True, dim: int = -1, descending: bool = False
) -> jax.Array:
    return _sorted(x, dim, descending)[1]


@lowers("msort")
def msort(x: jax.Array) -> jax.Array:
    return _sorted(x, 0, False)[0]


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
