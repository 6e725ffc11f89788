"""Convolution and its gradients, over the trailing spatial dims of `[N, C, ...]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.linalg.matmul import _precision
from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.nn.windows import (
    Ints,
    per_dim,
)
from xla_dtensor.lowering.partitioned.padding import padded
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers


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
        per_dim(v, spatial) for v in (stride, padding, dilation, output_padding)
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
def convolution(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *how: Any) -> jax.Array:
    out = _convolve(x, weight, *how)
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

    As a convolution it has groups of the batch, of which XLA's partitioner counts shards several
    times (`base/xla_faults.py:GROUPED_WEIGHTS`; cases `conv` of tests/lowering/partitioning.py).
    """
    spatial = weight.ndim - 2
    stride, padding, dilation = (per_dim(v, spatial) for v in (stride, padding, dilation))
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


for _kind in (Kind.PRODUCT, Kind.CONVOLUTION):
    are(_kind, "convolution", "convolution_backward")
