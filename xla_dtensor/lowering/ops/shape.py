"""Joining, padding, shuffling, reversing and repeating."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_dtensor.lowering.dims import wrap_dim
from xla_dtensor.lowering.ops.indexing import SHAPE_DEPENDS
from xla_dtensor.lowering.partitioned.padding import padded
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


# Reorderings ---------------------------------------------------------------------------------


@lowers("roll")
def roll(x: jax.Array, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> jax.Array:
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        return jnp.roll(x.reshape(-1), shifts[0]).reshape(x.shape)
    return jnp.roll(x, shifts, [wrap_dim(d, x.ndim) for d in dims]) if x.ndim else x


@lowers("flip")
def flip(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return lax.rev(x, [wrap_dim(d, x.ndim) for d in dims]) if x.ndim else x


@lowers("repeat")
def repeat(x: jax.Array, repeats: Sequence[int]) -> jax.Array:
    return jnp.tile(x, tuple(repeats))


@lowers("repeat_interleave.Tensor")
def repeat_interleave(repeats: jax.Array, *, output_size: int | None = None) -> jax.Array:
    if output_size is None:
        raise TypeError(
            "repeat_interleave without output_size: "
            + SHAPE_DEPENDS.format("tensor of repeats", "pass output_size")
        )
    ends = jnp.cumsum(repeats)
    # Which input an output belongs to: the first whose end is behind it.
    found = jnp.searchsorted(ends, jnp.arange(output_size, dtype=ends.dtype), side="right")
    return found.astype(repeats.dtype)
