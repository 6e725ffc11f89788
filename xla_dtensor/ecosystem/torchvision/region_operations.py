"""``roi_align``, ``roi_pool`` and their position-sensitive kin, with their backward passes.

Definitions and their edges are those of torchvision's CPU kernels (``csrc/ops/cpu``).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch.distributed.tensor import Partial, Shard

from xla_dtensor.ecosystem.torchvision.regions import Regions, pooled, sampled
from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers
from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.merging import REPLICATE
from xla_dtensor.rules.registry import register


def _wide(*arrays: jax.Array) -> list[jax.Array]:
    return [x.astype(math_dtype(x.dtype)) for x in arrays]


def _first(x: jax.Array) -> jax.Array:
    """``[K, bins, bins, channels]`` with the channels first, as torchvision has them."""
    return x.transpose(0, 3, 1, 2)


def _last(x: jax.Array) -> jax.Array:
    return x.transpose(0, 2, 3, 1)


def _sets(count: int, channels: int, bins: tuple[int, int]) -> jax.Array:
    """Which channel of the image each bin reads, by position: ``channel_mapping``."""
    n = channels // (bins[0] * bins[1])
    each = jnp.arange(n * bins[0] * bins[1], dtype=np.int32).reshape(n, *bins)
    return jnp.broadcast_to(each, (count, *each.shape))


# --- the operations ------------------------------------------------------------------------------


@lowers("torchvision::roi_align")
def roi_align(
    image: jax.Array,
    rois: jax.Array,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> jax.Array:
    image, rois = _wide(image, rois)
    bins = pooled_height, pooled_width
    regions = _align_regions(image.shape, rois, spatial_scale, bins, sampling_ratio, aligned)
    return _first(regions.summed(image) / jnp.maximum(regions.total(), 1)[..., None])


def _align_regions(
    shape: tuple[int, ...],
    rois: jax.Array,
    scale: float,
    bins: tuple[int, int],
    ratio: int,
    aligned: bool,
) -> Regions:
    offset, at_least = (0.5, None) if aligned else (0.0, 1.0)
    return sampled(shape, rois, scale, bins, ratio, offset=offset, at_least=at_least)


@lowers("torchvision::_roi_align_backward")
def roi_align_backward(
    grad: jax.Array,
    rois: jax.Array,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
    sampling_ratio: int,
    aligned: bool,
) -> jax.Array:
    grad, rois = _wide(grad, rois)
    # Of the channels there may be a shard.
    shape, bins = (batch_size, grad.shape[1], height, width), (pooled_height, pooled_width)
    regions = _align_regions(shape, rois, spatial_scale, bins, sampling_ratio, aligned)
    return regions.spread(_last(grad) / jnp.maximum(regions.total(), 1)[..., None])


@lowers("torchvision::ps_roi_align")
def ps_roi_align(
    image: jax.Array,
    rois: jax.Array,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
) -> tuple[jax.Array, jax.Array]:
    image, rois = _wide(image, rois)
    bins = pooled_height, pooled_width
    regions = sampled(
        image.shape, rois, spatial_scale, bins, sampling_ratio, offset=0.5, by_position=True
    )
    # Of an empty region torchvision divides 0 by 0.
    result = _first(regions.summed(image) / regions.total()[..., None])
    return result, _sets(len(rois), image.shape[1], bins)


@lowers("torchvision::_ps_roi_align_backward")
def ps_roi_align_backward(
    grad: jax.Array,
    rois: jax.Array,
    channel_mapping: jax.Array,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
) -> jax.Array:
    grad, rois = _wide(grad, rois)
    shape, bins = (batch_size, channels, height, width), (pooled_height, pooled_width)
    regions = sampled(
        shape, rois, spatial_scale, bins, sampling_ratio, offset=0.5, by_position=True
    )
    total = regions.total()[..., None]
    return regions.spread(_last(grad) / jnp.where(total == 0, 1, total))


@lowers("torchvision::roi_pool")
def roi_pool(
    image: jax.Array, rois: jax.Array, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[jax.Array, jax.Array]:
    image, rois = _wide(image, rois)
    bins = pooled_height, pooled_width
    regions = pooled(image.shape, rois, spatial_scale, bins, inclusive=True)
    table, width = regions.table(image), image.shape[3]

    def greater(state: Any, y: jax.Array, x: jax.Array, weight: jax.Array) -> Any:
        most, where = state
        read = table.at[regions.row(y, x)].get(mode="clip")
        is_greater = (weight[..., None] != 0) & (read > most)
        pixel = jnp.broadcast_to((y * width + x)[..., None], where.shape)
        return jnp.where(is_greater, read, most), jnp.where(is_greater, pixel, where)

    shape = (len(rois), *bins, table.shape[1])
    # torchvision begins with the least float32 in any precision.
    least = jnp.full(shape, np.finfo(np.float32).min, table.dtype)
    most, where = regions.over(greater, (least, jnp.full(shape, -1, np.int32)))
    is_empty = regions.total()[..., None] == 0
    return _first(jnp.where(is_empty, 0, most)), _first(where)


@lowers("torchvision::_roi_pool_backward")
def roi_pool_backward(
    grad: jax.Array,
    rois: jax.Array,
    argmax: jax.Array,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
) -> jax.Array:
    grad, rois = _wide(grad, rois)
    shape = (batch_size, grad.shape[1], height * width)
    image = rois[:, 0].astype(np.int32)[:, None, None, None]
    channel = jnp.arange(shape[1], dtype=np.int32)[:, None, None]
    # Out of range where nothing was read: -1 would be the last pixel.
    pixel = jnp.where(argmax < 0, shape[2], argmax)
    result = jnp.zeros(shape, grad.dtype).at[image, channel, pixel].add(grad, mode="drop")
    return result.reshape(*shape[:2], height, width)


@lowers("torchvision::ps_roi_pool")
def ps_roi_pool(
    image: jax.Array, rois: jax.Array, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[jax.Array, jax.Array]:
    image, rois = _wide(image, rois)
    bins = pooled_height, pooled_width
    # The last row and column are in no bin; in the backward pass they are, in torchvision as here.
    regions = pooled(
        image.shape, rois, spatial_scale, bins, inclusive=False, short=1, by_position=True
    )
    result = _first(_mean(regions.summed(image), regions))
    return result, _sets(len(rois), image.shape[1], bins)


def _mean(sums: jax.Array, regions: Regions) -> jax.Array:
    total = regions.total()[..., None]
    return jnp.where(total > 0, sums / jnp.maximum(total, 1), 0)


@lowers("torchvision::_ps_roi_pool_backward")
def ps_roi_pool_backward(
    grad: jax.Array,
    rois: jax.Array,
    channel_mapping: jax.Array,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
) -> jax.Array:
    grad, rois = _wide(grad, rois)
    shape, bins = (batch_size, channels, height, width), (pooled_height, pooled_width)
    regions = pooled(shape, rois, spatial_scale, bins, inclusive=False, by_position=True)
    return regions.spread(_mean(_last(grad), regions))


# --- their layouts -------------------------------------------------------------------------------

_WHOLE = ("roi_align", "roi_pool")
_BY_POSITION = ("ps_roi_align", "ps_roi_pool")
_FORWARD = (*_WHOLE, *_BY_POSITION)
_BACKWARD = tuple(f"_{name}_backward" for name in _FORWARD)
# The loops end where the regions of a device do, and what is read is anywhere in the image.
are(Kind.CUT, *(f"torchvision::{name}" for name in (*_FORWARD, *_BACKWARD)))


@register(*_FORWARD, namespace="torchvision")
def forward(call: Call) -> Merged:
    """the regions, and channels if all bins read the same ones"""
    options = [Alternative((Shard(0),) * call.n_outputs, (REPLICATE, Shard(0)))]
    if call.name in _WHOLE:
        options.append(Alternative((Shard(1),) * call.n_outputs, (Shard(1), REPLICATE)))
    return call.merge(options)


@register(*_BACKWARD, namespace="torchvision")
def backward(call: Call) -> Merged:
    """the regions, whose gradients are added up, and channels if all bins read the same ones"""
    others = len(call.tensors) - 2  # what the forward pass has remembered, of the gradient's shape
    options = [Alternative((Partial(),), (Shard(0), Shard(0), *(Shard(0),) * others))]
    if call.name.removeprefix("_").removesuffix("_backward") in _WHOLE:
        options.append(Alternative((Shard(1),), (Shard(1), REPLICATE, *(Shard(1),) * others)))
    return call.merge(options)
