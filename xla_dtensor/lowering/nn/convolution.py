"""Convolution, pooling and resampling: ops over the trailing spatial dims of `[N, C, ...]`.

Pooling and resampling treat one spatial dim at a time (their windows are products of per-dim
windows): a 7x7 window costs 14 steps instead of 49. Positions and weights are static, computed
with NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.linalg.matmul import _precision
from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.ops.indexing import scatter_add
from xla_dtensor.lowering.partitioned.padding import padded
from xla_dtensor.lowering.partitioned.per_slice import per_slice
from xla_dtensor.lowering.partitioned.strided import strided_slice
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers

Ints = Sequence[int]


def _per_dim(value: Any, spatial: int) -> list[int]:
    """An ``int[n]`` argument, which may have one entry for all dims."""
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values


def _transposed(function: Callable[[jax.Array], jax.Array], x: Any, grad: jax.Array) -> jax.Array:
    """The gradient of a function linear in ``x`` (an array, or its shape and dtype)."""
    return jax.linear_transpose(function, jax.ShapeDtypeStruct(x.shape, grad.dtype))(grad)[0]


# Convolution ---------------------------------------------------------------------------------


def _convolve(
    x: jax.Array,
    weight: jax.Array,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> jax.Array:
    spatial = weight.ndim - 2
    stride, padding, dilation, output_padding = (
        _per_dim(v, spatial) for v in (stride, padding, dilation, output_padding)
    )
    pads = [(p, p) for p in padding]
    input_dilation = [1] * spatial
    if transposed:  # a convolution of the dilated input with the flipped, transposed weight
        kernel = weight.shape[2:]
        reach = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
        pads = [(r, r + extra) for r, extra in zip(reach, output_padding, strict=True)]
        stride, input_dilation = input_dilation, stride
        weight = lax.rev(weight, range(2, weight.ndim))
        grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        weight = jnp.swapaxes(grouped, 1, 2).reshape(-1, grouped.shape[1], *kernel)
    if x.size == 0 or weight.size == 0:
        kernel = weight.shape[2:]
        sizes = zip(x.shape[2:], kernel, pads, stride, dilation, input_dilation, strict=True)
        out = [
            ((n - 1) * up + 1 + sum(pad) - d * (k - 1) - 1) // s + 1
            for n, k, pad, s, d, up in sizes
        ]
        return jnp.zeros((x.shape[0], weight.shape[0], *out), x.dtype)
    precision = _precision() if math_dtype(x.dtype) == x.dtype else None
    for dim in range(spatial):
        window = stride[dim], dilation[dim], input_dilation[dim], pads[dim]
        taps, pads[dim] = _taps(x.shape[2 + dim], weight.shape[2 + dim], *window)
        if taps is not None:
            weight = lax.slice_in_dim(weight, *taps, axis=2 + dim)
    windows = zip(
        x.shape[2:], weight.shape[2:], stride, dilation, input_dilation, pads, strict=True
    )
    if groups > 1 and all(_is_a_product(*window) for window in windows):
        return _grouped_product(x, weight, groups, precision)
    letters = "DHW"[3 - spatial :] if spatial <= 3 else "".join(map(chr, range(97, 97 + spatial)))
    return lax.conv_general_dilated(
        x,
        weight,
        window_strides=stride,
        padding=pads,
        lhs_dilation=input_dilation,
        rhs_dilation=dilation,
        dimension_numbers=("NC" + letters, "OI" + letters, "NC" + letters),
        feature_group_count=groups,
        precision=precision,
    )


def _taps(
    size: int, kernel: int, stride: int, dilation: int, up: int, pad: tuple[int, int]
) -> tuple[tuple[int, int] | None, tuple[int, int]]:
    """The positions of the kernel along a dim that meet more than padding, as (first, end) (None:
    all do, or none), and the padding of a convolution by those alone.

    Of an image one wide XLA may end the process otherwise (`base/xla_faults.py:ONLY_PADDING`).
    """
    before, after = pad
    last = (size - 1) * up
    out = (before + last + after - (kernel - 1) * dilation) // stride + 1
    first = max(0, -(((out - 1) * stride - before) // dilation))
    end = min(kernel, (before + last) // dilation + 1)
    if not 0 < end - first < kernel or out < 1:
        return None, pad
    before -= first * dilation
    reach = (out - 1) * stride + (end - first - 1) * dilation + 1
    return (first, end), (before, reach - before - last - 1)


def _is_a_product(size: int, kernel: int, stride: int, dilation: int, up: int, pad: Any) -> bool:
    """Whether a convolution along this dim takes each position by itself, or all of them once."""
    each, all_ = kernel == stride == 1, kernel == size and dilation == 1
    return up == 1 and not any(pad) and (each or all_)


def _grouped_product(x: jax.Array, weight: jax.Array, groups: int, precision: Any) -> jax.Array:
    """A convolution with groups where each dim `_is_a_product`: XLA's partitioner makes one of it,
    too, and loses the groups (`base/xla_faults.py:GROUPED_PRODUCTS`)."""
    letters = "xyzuvw"[: x.ndim - 2]
    kernel = weight.shape[2:]
    contracted = "".join(c for c, k in zip(letters, kernel, strict=True) if k > 1)
    kept = "".join(c for c, k in zip(letters, kernel, strict=True) if k == 1)
    out = jnp.einsum(
        f"ngi{letters},goi{contracted}->ngo{kept}",
        x.reshape(x.shape[0], groups, -1, *x.shape[2:]),
        weight.reshape(groups, -1, weight.shape[1], *(k for k in kernel if k > 1)),
        precision=precision,
    )
    shape = [n if k == 1 else 1 for n, k in zip(x.shape[2:], kernel, strict=True)]
    return out.reshape(x.shape[0], -1, *shape)


@meta_of("convolution")
def _convolution_meta(input: Any, weight: Any, *args: Any) -> Any:
    """torch's own, behind the check that its CPU kernels make, with their words."""
    transposed, groups = args[4], args[6]
    wanted = weight.shape[0] if transposed else weight.shape[1] * groups
    if input.ndim == weight.ndim and input.shape[1] != wanted:
        kind = f"transposed={int(transposed)}" if transposed else f"groups={groups}"
        raise RuntimeError(
            f"Given {kind}, weight of size {list(weight.shape)}, expected input"
            f"{list(input.shape)} to have {wanted} channels, but got {input.shape[1]} channels "
            "instead"
        )
    return torch.ops.aten.convolution.default(input, weight, *args)


@lowers("convolution", "convolution_overrideable")
def convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> jax.Array:
    out = _convolve(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    return out if bias is None else out + bias.reshape(-1, *[1] * (out.ndim - 2))


@lowers("_convolution", "_convolution.deprecated")
def _convolution(*args: Any) -> jax.Array:
    return convolution(*args[:9])  # the rest are switches of other backends


@lowers("convolution_backward")
def convolution_backward(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias_sizes: Ints | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    static = (stride, padding, dilation, transposed, output_padding, groups)
    forward = lambda x, weight: _convolve(x, weight, *static)
    # JAX's cotangents are the conjugates of torch's gradients.
    cotangent = jnp.conj(grad).astype(x.dtype)
    if groups == 1:
        _, pullback = jax.vjp(forward, x, weight)
        grads = [jnp.conj(g) for g in pullback(cotangent)]
    else:
        _, pullback = jax.vjp(lambda x: forward(x, weight), x)
        spaced = (stride, padding, dilation, transposed, groups)
        grads = [jnp.conj(pullback(cotangent)[0]), _grouped_weight_grad(grad, x, weight, *spaced)]
    wide = grad.astype(math_dtype(grad.dtype))
    grads.append(jnp.sum(wide, axis=(0, *range(2, grad.ndim))))
    return tuple(g if wanted else None for g, wanted in zip(grads, output_mask, strict=True))


def _grouped_weight_grad(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    groups: int,
) -> jax.Array:
    """The gradient of a grouped convolution's weight, as a matrix product per element of the
    kernel.

    As a convolution it has groups of the batch, and XLA's partitioner counts shards of the batch
    several times in some layouts (cases `conv` of tests/lowering/partitioning.py).
    """
    spatial = weight.ndim - 2
    stride, padding, dilation = (_per_dim(v, spatial) for v in (stride, padding, dilation))
    # Position p of one is multiplied with position p * stride + k * dilation of the other.
    each, other = (jnp.conj(x), grad) if transposed else (grad, jnp.conj(x))
    batch, positions = each.shape[0], each.shape[2:]
    if 0 in each.shape or 0 in other.shape:
        return jnp.zeros(weight.shape, weight.dtype)
    reach = [
        (n - 1) * s + (k - 1) * d + 1
        for n, s, k, d in zip(positions, stride, weight.shape[2:], dilation, strict=True)
    ]
    widths = [(0, 0), (0, 0)]
    widths += [
        (pad, r - pad - n) for pad, r, n in zip(padding, reach, other.shape[2:], strict=True)
    ]
    other = padded(other, widths)
    grouped = lambda a: a.reshape(batch, groups, a.shape[1] // groups, *positions)
    each = grouped(each)
    letters = "xyzuvw"[:spatial]
    taps = []
    for tap in np.ndindex(*weight.shape[2:]):
        start = [k * d for k, d in zip(tap, dilation, strict=True)]
        limit = [b + (n - 1) * s + 1 for b, n, s in zip(start, positions, stride, strict=True)]
        picked = lax.slice(other, [0, 0, *start], [batch, other.shape[1], *limit], [1, 1, *stride])
        taps.append(
            jnp.einsum(
                f"nga{letters},ngb{letters}->gab",
                each,
                grouped(picked),
                precision=_precision(),
                preferred_element_type=math_dtype(grad.dtype),
            )
        )
    return jnp.stack(taps, -1).reshape(weight.shape)


@lowers("conv_tbc")
def conv_tbc(x: jax.Array, weight: jax.Array, bias: jax.Array, pad: int = 0) -> jax.Array:
    x, weight = x.transpose(1, 2, 0), weight.transpose(2, 1, 0)
    return convolution(x, weight, bias, [1], [pad], [1], False, [0], 1).transpose(2, 0, 1)


# Windows of one dim --------------------------------------------------------------------------


def _output_size(size: int, kernel: int, stride: int, pad: int, dilation: int, ceil: bool) -> int:
    span = size + 2 * pad - dilation * (kernel - 1) - 1 + (stride - 1 if ceil else 0)
    out = span // stride + 1
    # With ceil_mode the last window must start inside the input or its left padding.
    return out - 1 if ceil and (out - 1) * stride >= size + pad else out


def _windows(
    size: int, kernel: int, stride: int, pad: int, dilation: int, ceil: bool
) -> np.ndarray:
    """Positions ``[output, element]`` of each window; some are outside of the dim."""
    out = _output_size(size, kernel, stride, pad, dilation, ceil)
    return (np.arange(out) * stride - pad)[:, None] + np.arange(kernel) * dilation


def _adaptive_windows(size: int, out: int) -> np.ndarray:
    """Windows of unequal length, filled up with -1."""
    start = np.arange(out) * size // max(out, 1)
    end = -(-(np.arange(out) + 1) * size // max(out, 1))
    positions = start[:, None] + np.arange(max((end - start).max(initial=0), 1))
    return np.where(positions < end[:, None], positions, -1)


def _pick(x: jax.Array, positions: np.ndarray, dim: int) -> jax.Array:
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


def _along(values: np.ndarray, dim: int, ndim: int) -> np.ndarray:
    return values.reshape([-1 if d == dim else 1 for d in range(ndim)])


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
        best, where = _pick(values, first, dim), _pick(positions, first, dim)
        valid = lambda column, size=values.shape[dim]: (column >= 0) & (column < size)
        found = valid(first)
        for column in rest:
            value, position = _pick(values, column, dim), _pick(positions, column, dim)
            better = (value > best) | jnp.not_equal(value, value) | ~_along(found, dim, x.ndim)
            better &= _along(valid(column), dim, x.ndim)
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
        kernel, pads, dilations = (_per_dim(v, spatial) for v in (kernel_size, padding, dilation))
        strides = _per_dim(stride, spatial) or kernel
        sizes = x.shape[x.ndim - spatial :]
        each = zip(sizes, kernel, strides, pads, dilations, strict=True)
        return _max_over(x, [_windows(*args, ceil_mode) for args in each])

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
        out = _per_dim(output_size, spatial)
        return _max_over(x, [_adaptive_windows(*args) for args in zip(sizes, out, strict=True)])

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
        kernel, pads = _per_dim(kernel_size, spatial), _per_dim(padding, spatial)
        strides = _per_dim(stride, spatial) or kernel
        lead = x.ndim - spatial
        wide = x.astype(math_dtype(x.dtype))
        config, divisor = [(0, 0)] * lead, np.ones((), np.int64)
        each = zip(x.shape[lead:], kernel, strides, pads, strict=True)
        for dim, (size, k, s, pad) in enumerate(each, lead):
            start = np.arange(_output_size(size, k, s, pad, 1, ceil_mode)) * s - pad
            config.append((pad, int(start[-1]) + k - size))
            margin = pad if count_include_pad else 0
            counted = np.minimum(start + k, size + margin) - np.maximum(start, -margin)
            divisor = divisor * _along(counted, dim, x.ndim)
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
        return _transposed(lambda x: pool(x, *args), x, wide)

    return backward


def _adaptive_avg_pool(spatial: int) -> Callable[..., jax.Array]:
    def adaptive_avg_pool(x: jax.Array, output_size: Ints) -> jax.Array:
        x = x.astype(math_dtype(x.dtype))
        lead = x.ndim - spatial
        for dim, out in enumerate(_per_dim(output_size, spatial), lead):
            size = x.shape[dim]
            if out and size % out == 0:
                x = jnp.mean(
                    x.reshape(*x.shape[:dim], out, size // out, *x.shape[dim + 1 :]), dim + 1
                )
                continue
            table = _adaptive_windows(size, out)
            valid = table >= 0
            elements = jnp.take(x, np.maximum(table, 0), axis=dim, mode="clip")
            shape = [1] * elements.ndim
            shape[dim : dim + 2] = table.shape
            total = jnp.sum(jnp.where(valid.reshape(shape), elements, 0), axis=dim + 1)
            x = total / jnp.asarray(_along(valid.sum(1), dim, x.ndim), x.dtype)
        return x

    return adaptive_avg_pool


def _adaptive_avg_pool_backward(spatial: int) -> Callable[..., jax.Array]:
    pool = _adaptive_avg_pool(spatial)

    def backward(grad: jax.Array, x: jax.Array) -> jax.Array:
        wide = grad.astype(math_dtype(grad.dtype))
        out = grad.shape[grad.ndim - spatial :]
        return _transposed(lambda x: pool(x, out), x, wide)

    return backward


for _n in (2, 3):
    lowers(f"avg_pool{_n}d")(_avg_pool(_n))
    lowers(f"avg_pool{_n}d_backward")(_avg_pool_backward(_n))
    lowers(f"_adaptive_avg_pool{_n}d")(_adaptive_avg_pool(_n))
    lowers(f"_adaptive_avg_pool{_n}d_backward")(_adaptive_avg_pool_backward(_n))


# Resampling ----------------------------------------------------------------------------------

# Per output position, the input positions that it reads and their weights: both [output, tap].
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
        return _pick(x, positions[:, 0], dim)
    picked = (
        _pick(x, column, dim) * jnp.asarray(_along(weight, dim, x.ndim), x.dtype)
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
        return _transposed(lambda x: _upsampled(x, output_size, align, scales, taps), x, wide)


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


for _kind in (Kind.PRODUCT, Kind.CONVOLUTION):
    are(_kind, "convolution", "convolution_backward")
