"""Upsampling, and antialiased resampling, to another size: the modes of `interpolate`.

One spatial dim at a time; positions and weights are static, computed with NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering.dims import along
from xla_dtensor.lowering.nn.windows import (
    Ints,
    pick,
    transpose_of,
)
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers

Taps = tuple[np.ndarray, np.ndarray]


def _scale(size: int, out: int, align: bool, scale: float | None, real: Any) -> Any:
    """How far one output step is in the input, rounded as torch does in ``real``."""
    if align:
        return real(size - 1) / real(out - 1) if out > 1 else real(0)
    return real(1 / scale) if scale else real(size) / real(out)


def _centers(size: int, out: int, align: bool, scale: float | None, real: Any) -> np.ndarray:
    step, position = _scale(size, out, align, scale, real), np.arange(out, dtype=real)
    return step * position if align else step * (position + real(0.5)) - real(0.5)


def _nearest_taps(shift: float) -> Callable[..., Taps]:
    def taps(size: int, out: int, align: bool, scale: float | None, real: Any) -> Taps:
        # torch computes these positions in single precision, whatever the tensor's dtype.
        step = _scale(size, out, False, scale, np.float32)
        source = np.floor((np.arange(out, dtype=np.float32) + np.float32(shift)) * step)
        return np.minimum(source.astype(np.int64), size - 1)[:, None], np.ones((out, 1))

    return taps


def _linear_taps(size: int, out: int, align: bool, scale: float | None, real: Any) -> Taps:
    source = np.maximum(_centers(size, out, align, scale, real), 0)
    low = np.minimum(source.astype(np.int64), size - 1)
    fraction = np.clip(source - low, 0, 1)
    return np.stack([low, np.minimum(low + 1, size - 1)], 1), np.stack([1 - fraction, fraction], 1)


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    """Keys' cubic convolution kernel."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def _cubic_taps(size: int, out: int, align: bool, scale: float | None, real: Any) -> Taps:
    source = _centers(size, out, align, scale, real)
    low = np.floor(source)
    positions = low[:, None] + np.arange(-1, 3)
    weights = _cubic(source[:, None] - positions, -0.75)
    return np.clip(positions.astype(np.int64), 0, size - 1), weights


def _antialiased(kernel: Callable[[np.ndarray], np.ndarray], reach: float) -> Callable[..., Taps]:
    def taps(size: int, out: int, align: bool, scale: float | None, real: Any) -> Taps:
        step = float(_scale(size, out, align, scale, np.float64))
        stretch = max(step, 1.0)
        center = step * (np.arange(out) + 0.5)
        start = np.maximum((center - reach * stretch + 0.5).astype(np.int64), 0)
        end = np.minimum((center + reach * stretch + 0.5).astype(np.int64), size)
        positions = start[:, None] + np.arange((end - start).max(initial=1))
        weights = kernel((positions - center[:, None] + 0.5) / stretch)
        weights = np.where(positions < end[:, None], weights, 0)
        return np.minimum(positions, size - 1), weights / weights.sum(1, keepdims=True)

    return taps


def _resample(x: jax.Array, dim: int, taps: Taps) -> jax.Array:
    positions, weights = taps
    out, size = len(positions), x.shape[dim]
    if positions.shape[1] == 1:
        factor = out // size
        if out == size * factor and np.array_equal(positions[:, 0], np.arange(out) // factor):
            return jnp.repeat(x, factor, axis=dim)  # a broadcast: it keeps the dim's sharding
        return pick(x, positions[:, 0], dim)
    picked = (
        pick(x, column, dim) * jnp.asarray(along(weight, dim, x.ndim), x.dtype)
        for column, weight in zip(positions.T, weights.T, strict=True)
    )
    return sum(picked, start=jnp.zeros((), x.dtype))


def _upsampled(
    x: jax.Array, output_size: Ints, align: bool, scales: Sequence[float | None], taps: Any
) -> jax.Array:
    real = np.float64 if x.dtype == np.float64 else np.float32
    scales = [*scales, *[None] * (len(output_size) - len(scales))]
    for dim, (out, scale) in enumerate(zip(output_size, scales, strict=True), 2):
        x = _resample(x, dim, taps(x.shape[dim], out, align, scale, real))
    return x


def _register_upsample(name: str, taps: Callable[..., Taps], aligns: bool) -> None:
    """The forward and backward overload of one mode; only some have ``align_corners``."""
    interpolates = taps not in _NEAREST

    def split(args: tuple[Any, ...]) -> tuple[bool, Sequence[float | None]]:
        return (args[0], args[1:]) if aligns else (False, args)

    @lowers(name)
    def upsample(x: jax.Array, output_size: Ints, *args: Any, **kwargs: Any) -> jax.Array:
        align, scales = split((*args, *kwargs.values()))
        if not interpolates:
            return _upsampled(x, output_size, align, scales, taps)
        wide = x.astype(np.float32) if x.dtype.kind in "iu" else x.astype(math_dtype(x.dtype))
        out = _upsampled(wide, output_size, align, scales, taps)
        if x.dtype.kind not in "iu":
            return out
        limits = jnp.iinfo(x.dtype)
        return jnp.clip(jnp.round(out), limits.min, limits.max)

    @lowers(name + "_backward")
    def backward(
        grad: jax.Array, output_size: Ints, input_size: Ints, *args: Any, **kwargs: Any
    ) -> jax.Array:
        align, scales = split((*args, *kwargs.values()))
        wide = grad.astype(math_dtype(grad.dtype))
        x = jax.ShapeDtypeStruct(tuple(input_size), wide.dtype)
        return transpose_of(lambda x: _upsampled(x, output_size, align, scales, taps), x, wide)


_nearest, _nearest_exact = _nearest_taps(0.0), _nearest_taps(0.5)
_NEAREST = (_nearest, _nearest_exact)
for _n, _linear in {1: "linear1d", 2: "bilinear2d", 3: "trilinear3d"}.items():
    _register_upsample(f"upsample_nearest{_n}d", _nearest, aligns=False)
    _register_upsample(f"_upsample_nearest_exact{_n}d", _nearest_exact, aligns=False)
    _register_upsample(f"upsample_{_linear}", _linear_taps, aligns=True)
_register_upsample("upsample_bicubic2d", _cubic_taps, aligns=True)
_register_upsample(
    "_upsample_bilinear2d_aa",
    _antialiased(lambda x: np.maximum(1 - np.abs(x), 0), 1.0),
    aligns=True,
)
_register_upsample(
    "_upsample_bicubic2d_aa", _antialiased(lambda x: _cubic(x, -0.5), 2.0), aligns=True
)
