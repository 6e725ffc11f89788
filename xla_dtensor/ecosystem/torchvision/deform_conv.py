"""``deform_conv2d``: a convolution whose kernel reads at offsets given by another tensor.

What the kernel reads is a matrix of columns, as in an ordinary convolution's im2col; a place
between pixels reads four of them, and 0 outside of the image. The gradients are JAX's, of the same
function: a place's is that of the weights of its pixels, as in torchvision.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch.distributed.tensor import Partial, Shard

from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers
from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.merging import REPLICATE
from xla_dtensor.rules.registry import register


def _places(
    offset: jax.Array, kernel: int, out: int, stride: int, pad: int, dilation: int, dim: int
) -> jax.Array:
    """Where all elements of the kernel read along ``dim`` of the image, ``[..., kernel_height,
    kernel_width, out_height, out_width]``; 1 in place of what it doesn't depend on."""
    place = jnp.arange(out) * stride - pad + (jnp.arange(kernel) * dilation)[:, None]
    shape = [1, 1, 1, 1]
    shape[dim], shape[2 + dim] = kernel, out
    return place.reshape(shape).astype(offset.dtype) + offset


def _read(images: jax.Array, y: jax.Array, x: jax.Array) -> jax.Array:
    """``images[b, c]`` at the places ``y[b], x[b]``: ``[B, C, places]``."""
    b, c, height, width = images.shape
    pixels = images.reshape(b, c, height * width)
    low_y, low_x = (lax.stop_gradient(jnp.floor(place)) for place in (y, x))
    result = jnp.zeros((), images.dtype)
    for down, right in itertools.product((0, 1), repeat=2):
        at_y, at_x = low_y + down, low_x + right
        weight = (y - low_y if down else low_y + 1 - y) * (x - low_x if right else low_x + 1 - x)
        is_inside = (at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width)
        flat = jnp.where(is_inside, at_y * width + at_x, 0).astype(np.int32)
        value = jnp.take_along_axis(pixels, flat[:, None], axis=2, mode="clip")
        result = result + jnp.where(is_inside[:, None], value * weight[:, None], 0)
    return result


@lowers("torchvision::deform_conv2d")
def deform_conv2d(
    image: jax.Array,
    weight: jax.Array,
    offset: jax.Array,
    mask: jax.Array,
    bias: jax.Array,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> jax.Array:
    dtype = image.dtype
    wide = math_dtype(dtype)
    n, c = image.shape[:2]
    kernel, out = weight.shape[2:], offset.shape[2:]
    by_place = offset.astype(wide).reshape(n, offset_groups, *kernel, 2, *out)
    y = _places(by_place[..., 0, :, :], kernel[0], out[0], stride_h, pad_h, dilation_h, 0)
    x = _places(by_place[..., 1, :, :], kernel[1], out[1], stride_w, pad_w, dilation_w, 1)
    lead = n * offset_groups
    images = image.astype(wide).reshape(lead, c // offset_groups, *image.shape[2:])
    columns = _read(images, y.reshape(lead, -1), x.reshape(lead, -1))
    if use_mask:
        columns = columns * mask.astype(wide).reshape(lead, 1, -1)
    columns = columns.reshape(n, groups, c // groups, *kernel, *out).astype(dtype)
    kernels = weight.reshape(groups, -1, *weight.shape[1:])
    result = jnp.einsum(
        "ngcijyx,gocij->ngoyx", columns, kernels, preferred_element_type=wide
    ).reshape(n, -1, *out)
    return result + bias[:, None, None]


@lowers("torchvision::_deform_conv2d_backward")
def deform_conv2d_backward(
    grad: jax.Array,
    image: jax.Array,
    weight: jax.Array,
    offset: jax.Array,
    mask: jax.Array,
    bias: jax.Array,
    *options: int,
) -> tuple[jax.Array, ...]:
    tensors = image, weight, offset, mask, bias
    tensors = tuple(x.astype(math_dtype(x.dtype)) for x in tensors)
    _, gradients = jax.vjp(lambda *tensors: deform_conv2d(*tensors, *options), *tensors)
    found: tuple[jax.Array, ...] = gradients(grad.astype(math_dtype(grad.dtype)))
    return found


# --- their layouts -------------------------------------------------------------------------------

# What is read is anywhere in an image, and what is written in the backward pass.
are(Kind.CUT, "torchvision::deform_conv2d", "torchvision::_deform_conv2d_backward")
_R, _ROWS, _SUM = REPLICATE, Shard(0), Partial()


@register("deform_conv2d", namespace="torchvision")
def forward(call: Call) -> Merged:
    """the batch, and channels of the result if they aren't in groups"""
    options = [Alternative((_ROWS,), (_ROWS, _R, _ROWS, _ROWS, _R))]
    if call.args["groups"] == 1:
        options.append(Alternative((Shard(1),), (_R, _ROWS, _R, _R, _ROWS)))
    return call.merge(options)


@register("_deform_conv2d_backward", namespace="torchvision")
def backward(call: Call) -> Merged:
    """the same; what all of a batch or all channels have is a sum"""
    options = [Alternative((_ROWS, _SUM, _ROWS, _ROWS, _SUM), (_ROWS, _ROWS, _R, _ROWS, _ROWS, _R))]
    if call.args["groups"] == 1:
        options.append(
            Alternative((_SUM, _ROWS, _SUM, _SUM, _ROWS), (Shard(1), _R, _ROWS, _R, _R, _ROWS))
        )
    return call.merge(options)
