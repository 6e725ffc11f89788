"""Fourier transforms, dim by dim: XLA's own operation takes three dims at most.

One is an equation of its own until it is lowered, so that layouts over a step keep its dim whole
(`layouts/factors.py`): XLA ends the process where that is short and sharded. Lowered, it has its
dim last, and on CPUs asks for row-major layouts around it (`workarounds.ROW_MAJOR_TRANSFORMS`). The
dispatcher keeps the transformed dims whole (`plans/result_placements.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.partitioned.padding import padded
from xla_dtensor.lowering.partitioned.strided import strided_slice
from xla_dtensor.lowering.registry import lowers
from xla_dtensor.lowering.workarounds import ROW_MAJOR_TRANSFORMS


def _plain(x: jax.Array, *, kind: lax.FftType, axis: int, length: int) -> jax.Array:
    return jnp.moveaxis(lax.fft(jnp.moveaxis(x, axis, -1), kind, (length,)), -1, axis)


def _row_major(x: jax.Array, *, kind: lax.FftType, axis: int, length: int) -> jax.Array:
    layout = Layout(major_to_minor=tuple(range(x.ndim)))
    last = with_layout_constraint(jnp.moveaxis(x, axis, -1), layout)
    out = with_layout_constraint(lax.fft(last, kind, (length,)), layout)
    return jnp.moveaxis(out, -1, axis)


_primitive = Primitive("transform")
_run = jax.jit(
    lambda x, kind, axis, length: _primitive.bind(x, kind=kind, axis=axis, length=length),
    static_argnames=("kind", "axis", "length"),
)
_primitive.def_impl(_run)


@_primitive.def_abstract_eval
def _like(x: Any, **params: Any) -> Any:
    like = jax.eval_shape(functools.partial(_plain, **params), x)
    return x.update(shape=like.shape, dtype=like.dtype)


def _transpose(cotangent: Any, x: Any, **params: Any) -> Any:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval)]
    return jax.linear_transpose(functools.partial(_plain, **params), x.aval)(cotangent)


def _batch(values: Any, dims: Any, *, axis: int, **params: Any) -> Any:
    (x,), (lead,) = values, dims
    return _primitive.bind(x, axis=axis + (lead <= axis), **params), lead


ad.deflinear2(_primitive, _transpose)
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, mlir.lower_fun(_plain, multiple_results=False))
for _platform in ROW_MAJOR_TRANSFORMS.platforms:
    mlir.register_lowering(
        _primitive, mlir.lower_fun(_row_major, multiple_results=False), platform=_platform
    )


def _transform(x: jax.Array, kind: lax.FftType, dim: int, length: int) -> jax.Array:
    """The unscaled transform of ``dim``; ``length`` is that of the real side."""
    if 0 in x.shape:
        shape = list(x.shape)
        shape[dim] = {"RFFT": length // 2 + 1}.get(kind.name, length)
        real = {"RFFT": jnp.complex64, "IRFFT": jnp.float32}.get(kind.name)
        dtype = x.dtype if real is None else jnp.result_type(x.dtype, real)
        if kind is lax.FftType.IRFFT:
            dtype = jnp.finfo(x.dtype).dtype
        return jnp.zeros(shape, dtype)
    out: jax.Array = _primitive.bind(x, kind=kind, axis=dim % x.ndim, length=length)
    # XLA's inverse transforms divide by the length.
    return out * length if kind in (lax.FftType.IFFT, lax.FftType.IRFFT) else out


def _complex(x: jax.Array, dims: Sequence[int], forward: bool) -> jax.Array:
    kind = lax.FftType.FFT if forward else lax.FftType.IFFT
    for dim in dims:
        x = _transform(x, kind, dim, x.shape[dim])
    return x


def _normalised(x: jax.Array, lengths: Sequence[int], normalization: int) -> jax.Array:
    """torch's codes: 0 nothing, 1 by the root of the transforms' size, 2 by the size."""
    size = math.prod(lengths)
    if normalization == 0 or size == 0:
        return x
    return x * x.real.dtype.type(1 / (math.sqrt(size) if normalization == 1 else size))


@lowers("_fft_c2c")
def fft_c2c(x: jax.Array, dim: Sequence[int], normalization: int, forward: bool) -> jax.Array:
    return _normalised(_complex(x, dim, forward), [x.shape[d] for d in dim], normalization)


@lowers("_fft_r2c")
def fft_r2c(x: jax.Array, dim: Sequence[int], normalization: int, onesided: bool) -> jax.Array:
    lengths = [x.shape[d] for d in dim]
    if onesided:
        last = _transform(x, lax.FftType.RFFT, dim[-1], lengths[-1])
    else:
        last = _complex(lax.complex(x, jnp.zeros_like(x)), dim[-1:], True)
    return _normalised(_complex(last, dim[:-1], True), lengths, normalization)


@lowers("_fft_c2r")
def fft_c2r(x: jax.Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> jax.Array:
    lengths = [*(x.shape[d] for d in dim[:-1]), last_dim_size]
    whole = _complex(x, dim[:-1], False)
    wanted, last = last_dim_size // 2 + 1, dim[-1] % x.ndim
    whole = strided_slice(whole, last, 0, min(wanted, whole.shape[last]), 1)
    if whole.shape[last] < wanted:
        missing = wanted - whole.shape[last]
        whole = padded(whole, [(0, missing if d == last else 0) for d in range(x.ndim)])
    out = _transform(whole, lax.FftType.IRFFT, last, last_dim_size)
    return _normalised(out, lengths, normalization)


are(Kind.TRANSFORM, "_fft_c2c.*", "_fft_r2c.*", "_fft_c2r.*")
