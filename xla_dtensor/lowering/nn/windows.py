"""What convolution, pooling and resampling share: arguments per spatial dim, windows, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering.partitioned.padding import padded
from xla_dtensor.lowering.partitioned.strided import strided_slice

Ints = Sequence[int]


def per_dim(value: Any, spatial: int) -> list[int]:
    """An ``int[n]`` argument, which may have one entry for all dims."""
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values


def transpose_of(function: Callable[[jax.Array], jax.Array], x: Any, grad: jax.Array) -> jax.Array:
    """The gradient of a function linear in ``x`` (an array, or its shape and dtype)."""
    return jax.linear_transpose(function, jax.ShapeDtypeStruct(x.shape, grad.dtype))(grad)[0]


def output_size_of(size: int, kernel: int, stride: int, pad: int, dilation: int, ceil: bool) -> int:
    span = size + 2 * pad - dilation * (kernel - 1) - 1 + (stride - 1 if ceil else 0)
    out = span // stride + 1
    # With ceil_mode the last window must start inside the input or its left padding.
    return out - 1 if ceil and (out - 1) * stride >= size + pad else out


def windows_of(
    size: int, kernel: int, stride: int, pad: int, dilation: int, ceil: bool
) -> np.ndarray:
    """Positions ``[output, element]`` of each window; some are outside of the dim."""
    out = output_size_of(size, kernel, stride, pad, dilation, ceil)
    return (np.arange(out) * stride - pad)[:, None] + np.arange(kernel) * dilation


def adaptive_windows(size: int, out: int) -> np.ndarray:
    """Windows of unequal length, filled up with -1."""
    start = np.arange(out) * size // max(out, 1)
    end = -(-(np.arange(out) + 1) * size // max(out, 1))
    positions = start[:, None] + np.arange(max((end - start).max(initial=0), 1))
    return np.where(positions < end[:, None], positions, -1)


def pick(x: jax.Array, positions: np.ndarray, dim: int) -> jax.Array:
    """``x`` at static ``positions`` of ``dim``; those out of range read anything."""
    size, count = x.shape[dim], len(positions)
    steps = np.diff(positions)
    step = int(steps[0]) if count > 1 else 1
    if step < 1 or np.any(steps != step):
        # Narrow: libtpu ends the process on some scatters (of the gradient) with 64-bit indices.
        inside = np.clip(positions, 0, size - 1).astype(np.int32)
        return jnp.take(x, inside, axis=dim, mode="clip")
    first, last = int(positions[0]), int(positions[-1])
    before, after = max(-first, 0), max(last - size + 1, 0)
    if before or after:
        x = padded(x, [(before, after) if d == dim else (0, 0) for d in range(x.ndim)])
    return strided_slice(x, dim, first + before, count, step)
