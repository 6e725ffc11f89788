"""Maximum and average pooling, over windows and adaptive.

One spatial dim at a time, as windows are products of per-dim windows: a 7x7 window costs 14 steps
instead of 49. Positions are static, computed with NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.lowering.dims import along
from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.nn.windows import (
    Ints,
    adaptive_windows,
    output_size_of,
    per_dim,
    pick,
    transpose_of,
    windows_of,
)
from xla_dtensor.lowering.ops.scatter import scatter_add
from xla_dtensor.lowering.partitioned.padding import padded
from xla_dtensor.lowering.partitioned.per_slice import per_slice
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers

# Maximum pooling -----------------------------------------------------------------------------


def _max_over(x: jax.Array, windows: Sequence[np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """Maxima over the windows of the trailing dims, and their flat positions in those dims.

    As in torch the first of equal maxima counts, and NaN wins over all. Both survive doing one
    dim after the other, last dim first.
    """
    spatial = x.shape[x.ndim - len(windows) :]
    index = jnp.arange(math.prod(spatial), dtype=np.int32).reshape(spatial)
    best, where = x, jnp.broadcast_to(index, x.shape)
    for dim in reversed(range(x.ndim - len(windows), x.ndim)):
        table = windows[dim - x.ndim + len(windows)]
        values, positions = best, where
        first, *rest = table.T
        best, where = pick(values, first, dim), pick(positions, first, dim)
        valid = lambda column, size=values.shape[dim]: (column >= 0) & (column < size)
        found = valid(first)
        for column in rest:
            value, position = pick(values, column, dim), pick(positions, column, dim)
            better = (value > best) | jnp.not_equal(value, value) | ~along(found, dim, x.ndim)
            better &= along(valid(column), dim, x.ndim)
            best, where = jnp.where(better, value, best), jnp.where(better, position, where)
            found |= valid(column)
    return best, where.astype(np.int64)


def _max_pool(spatial: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def max_pool(
        x: jax.Array,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        kernel, pads, dilations = (per_dim(v, spatial) for v in (kernel_size, padding, dilation))
        strides = per_dim(stride, spatial) or kernel
        sizes = x.shape[x.ndim - spatial :]
        each = zip(sizes, kernel, strides, pads, dilations, strict=True)
        return _max_over(x, [windows_of(*args, ceil_mode) for args in each])

    return max_pool


def max_pool_backward(spatial: int) -> Callable[..., jax.Array]:
    """Each gradient goes to the flat position that ``indices``, the last argument, has for it."""

    def backward(grad: jax.Array, x: jax.Array, *args: Any) -> jax.Array:
        indices = args[-1]
        sizes = x.shape[x.ndim - spatial :]

        def scatter(indices: jax.Array, grad: jax.Array) -> jax.Array:
            lead = grad.shape[: grad.ndim - spatial]
            zeros = jnp.zeros((*lead, math.prod(sizes)), grad.dtype)
            flat = lambda a: a.reshape(*lead, math.prod(a.shape[a.ndim - spatial :]))
            return scatter_add(zeros, -1, flat(indices), flat(grad)).reshape(*lead, *sizes)

        result: jax.Array = per_slice(scatter, x.ndim - spatial, indices, grad)
        return result

    return backward


def _adaptive_max_pool(spatial: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def adaptive_max_pool(x: jax.Array, output_size: Ints) -> tuple[jax.Array, jax.Array]:
        sizes = x.shape[x.ndim - spatial :]
        out = per_dim(output_size, spatial)
        return _max_over(x, [adaptive_windows(*args) for args in zip(sizes, out, strict=True)])

    return adaptive_max_pool


for _n in (2, 3):
    lowers(f"max_pool{_n}d_with_indices")(_max_pool(_n))
    lowers(f"adaptive_max_pool{_n}d")(_adaptive_max_pool(_n))
    _backward = (f"max_pool{_n}d_with_indices_backward", f"adaptive_max_pool{_n}d_backward")
    lowers(*_backward)(max_pool_backward(_n))
    are(Kind.SLICED, *_backward)


# Average pooling -----------------------------------------------------------------------------


def _avg_pool(spatial: int) -> Callable[..., jax.Array]:
    def avg_pool(
        x: jax.Array,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> jax.Array:
        kernel, pads = per_dim(kernel_size, spatial), per_dim(padding, spatial)
        strides = per_dim(stride, spatial) or kernel
        lead = x.ndim - spatial
        wide = x.astype(math_dtype(x.dtype))
        config, divisor = [(0, 0)] * lead, np.ones((), np.int64)
        each = zip(x.shape[lead:], kernel, strides, pads, strict=True)
        for dim, (size, k, s, pad) in enumerate(each, lead):
            start = np.arange(output_size_of(size, k, s, pad, 1, ceil_mode)) * s - pad
            config.append((pad, int(start[-1]) + k - size))
            margin = pad if count_include_pad else 0
            counted = np.minimum(start + k, size + margin) - np.maximum(start, -margin)
            divisor = divisor * along(counted, dim, x.ndim)
        # A window that stops short of the input's end needs a crop, not a pad.
        wide = padded(wide, [(0, min(after, 0)) for _, after in config])
        total = lax.reduce_window(
            wide,
            # NumPy's: of a traced zero JAX doesn't see that this is a sum, the one reduction over
            # windows that it can transpose (`_avg_pool_backward`).
            np.zeros((), wide.dtype)[()],
            lax.add,
            (*[1] * lead, *kernel),
            (*[1] * lead, *strides),
            [(before, max(after, 0)) for before, after in config],
        )
        divisor = np.asarray(divisor_override) if divisor_override else divisor
        return lax.div(total, jnp.broadcast_to(jnp.asarray(divisor, total.dtype), total.shape))

    return avg_pool


def _avg_pool_backward(spatial: int) -> Callable[..., jax.Array]:
    pool = _avg_pool(spatial)

    def backward(grad: jax.Array, x: jax.Array, *args: Any) -> jax.Array:
        wide = grad.astype(math_dtype(grad.dtype))
        return transpose_of(lambda x: pool(x, *args), x, wide)

    return backward


def _adaptive_avg_pool(spatial: int) -> Callable[..., jax.Array]:
    def adaptive_avg_pool(x: jax.Array, output_size: Ints) -> jax.Array:
        x = x.astype(math_dtype(x.dtype))
        lead = x.ndim - spatial
        for dim, out in enumerate(per_dim(output_size, spatial), lead):
            size = x.shape[dim]
            if out and size % out == 0:
                x = jnp.mean(
                    x.reshape(*x.shape[:dim], out, size // out, *x.shape[dim + 1 :]), dim + 1
                )
                continue
            table = adaptive_windows(size, out)
            valid = table >= 0
            elements = jnp.take(x, np.maximum(table, 0), axis=dim, mode="clip")
            shape = [1] * elements.ndim
            shape[dim : dim + 2] = table.shape
            total = jnp.sum(jnp.where(valid.reshape(shape), elements, 0), axis=dim + 1)
            x = total / jnp.asarray(along(valid.sum(1), dim, x.ndim), x.dtype)
        return x

    return adaptive_avg_pool


def _adaptive_avg_pool_backward(spatial: int) -> Callable[..., jax.Array]:
    pool = _adaptive_avg_pool(spatial)

    def backward(grad: jax.Array, x: jax.Array) -> jax.Array:
        wide = grad.astype(math_dtype(grad.dtype))
        out = grad.shape[grad.ndim - spatial :]
        return transpose_of(lambda x: pool(x, out), x, wide)

    return backward


for _n in (2, 3):
    lowers(f"avg_pool{_n}d")(_avg_pool(_n))
    lowers(f"avg_pool{_n}d_backward")(_avg_pool_backward(_n))
    lowers(f"_adaptive_avg_pool{_n}d")(_adaptive_avg_pool(_n))
    lowers(f"_adaptive_avg_pool{_n}d_backward")(_adaptive_avg_pool_backward(_n))
