"""Regions of feature maps: ``roi_align``, ``roi_pool`` and their position-sensitive kin.

A region is cut into bins, and a bin is a sum over places of the image: of a few fractional ones,
each of which reads four pixels (align), or of its pixels (pool). Along each dim that is a `Line`:
what the bins read in step 0, 1, ... The operations walk over the steps of both dims, all bins of
all regions and channels at once, and the backward passes walk the same way. Where the number of
samples depends on the regions, so does the number of steps: a loop's end may, other than a shape.

Definitions and their edges are those of torchvision's CPU kernels (``csrc/ops/cpu``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

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

State = TypeVar("State")


@dataclass(frozen=True)
class Line:
    """What the bins of K regions read along one dim of the image.

    Attributes:
        steps: how many there are.
        taps: of a step the positions read and their weights, ``[K, bins]`` both.
        total: what the sum over the steps is divided by: ``[K, bins]`` or ``[K, 1]``.
    """

    steps: Any
    taps: Callable[[Any], list[tuple[jax.Array, jax.Array]]]
    total: jax.Array


def _divided(x: jax.Array, by: int) -> jax.Array:
    # XLA makes a product of a division by one number, which is off by a bit: a bin of 3 pixels
    # becomes one of 3.0000002, and is read at one place more.
    return x / lax.optimization_barrier(jnp.full_like(x, by))


def _samples(start: jax.Array, length: jax.Array, bins: int, ratio: int, size: int) -> Line:
    """The places of ``roi_align``: ``ratio`` of them per bin, or as many as it is long.

    Args:
        start, length: of the regions, ``[K, 1]``.
        bins, ratio: how many there are.
        size: of the image.
    """
    long = _divided(length, bins)
    count = jnp.full_like(long, ratio) if ratio > 0 else jnp.ceil(long)
    origin = start + jnp.arange(bins, dtype=start.dtype) * long
    first, steps = jnp.zeros_like(origin), ratio
    if ratio <= 0:
        # Of regions that reach far out of the image only the places in it.
        apart = long / count
        first = jnp.clip(jnp.floor((-1 - origin) / apart - 0.5), 0, count)
        end = jnp.clip(jnp.floor((size - origin) / apart - 0.5) + 2, 0, count)
        # No more fit into it, as they are more than half a pixel apart; of NaNs none.
        steps = jnp.max(jnp.nan_to_num(end - first), initial=0)
        steps = jnp.minimum(steps, 2 * size + 8).astype(np.int32)

    def taps(step: Any) -> list[tuple[jax.Array, jax.Array]]:
        at = first + step
        place = origin + (at + 0.5) * long / count
        is_read = (at < count) & (place >= -1) & (place <= size)
        place = jnp.where(is_read, jnp.maximum(place, 0), 0)
        low = jnp.minimum(jnp.floor(place), size - 1)
        high = jnp.minimum(low + 1, size - 1)
        share = jnp.where(low == high, 0, place - low)
        return [
            (low.astype(np.int32), jnp.where(is_read, 1 - share, 0)),
            (high.astype(np.int32), jnp.where(is_read, share, 0)),
        ]

    return Line(steps, taps, count)


def _pixels(start: jax.Array, length: jax.Array, bins: int, size: int) -> Line:
    """The pixels of the bins, up to position ``size``."""
    long = _divided(jnp.maximum(length, 1), bins)
    bin_ = jnp.arange(bins, dtype=start.dtype)
    low = jnp.clip(jnp.floor(bin_ * long) + start, 0, size)
    high = jnp.clip(jnp.ceil((bin_ + 1) * long) + start, 0, size)
    steps = jnp.minimum(jnp.max(jnp.nan_to_num(high - low), initial=0), size).astype(np.int32)

    def taps(step: Any) -> list[tuple[jax.Array, jax.Array]]:
        at = low + step
        is_read = at < high
        position = jnp.where(is_read, at, 0).astype(np.int32)
        return [(position, is_read.astype(start.dtype))]

    return Line(steps, taps, high - low)


class Regions:
    """The bins of one call.

    Args:
        shape: of the image, ``[N, C, H, W]``.
        rois: ``[K, 5]``: which image, and x and y of two corners.
        lines: along y and x.
        bins: how many there are along y and x.
        by_position: whether each bin has channels of its own.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        rois: jax.Array,
        lines: tuple[Line, Line],
        bins: tuple[int, int],
        by_position: bool,
    ) -> None:
        self.shape, self.image, self.lines, self.bins = shape, rois[:, 0], lines, bins
        self.sets = bins[0] * bins[1] if by_position else 1
        """How many sets of channels there are."""

    def over(
        self,
        body: Callable[[State, jax.Array, jax.Array, jax.Array], State],
        state: State,
    ) -> State:
        """``body(state, y, x, weight)`` for all that is read, each ``[K, bins, bins]``, or 1 in
        place of a number of bins; in the order of the pixels."""
        rows, columns = self.lines

        def row(i: Any, state: State) -> State:
            def column(j: Any, state: State) -> State:
                for (y, of_y), (x, of_x) in itertools.product(rows.taps(i), columns.taps(j)):
                    weight = of_y[:, :, None] * of_x[:, None, :]
                    state = body(state, y[:, :, None], x[:, None, :], weight)
                return state

            return lax.fori_loop(0, columns.steps, column, state)

        return lax.fori_loop(0, rows.steps, row, state)

    def total(self) -> jax.Array:
        """``[K, bins, bins]``, or 1 in place of a number of bins."""
        return self.lines[0].total[:, :, None] * self.lines[1].total[:, None, :]

    def table(self, image: jax.Array) -> jax.Array:
        """The channels of each pixel, of one set, as a row."""
        n, c, h, w = self.shape
        split = image.reshape(n, c // self.sets, self.sets, h, w)
        return split.transpose(0, 3, 4, 2, 1).reshape(-1, c // self.sets)

    def of_table(self, table: jax.Array) -> jax.Array:
        """The image with these rows."""
        n, c, h, w = self.shape
        split = table.reshape(n, h, w, self.sets, c // self.sets)
        return split.transpose(0, 4, 3, 1, 2).reshape(self.shape)

    def row(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """Which row of the table has the channels that the bins read there."""
        _, _, h, w = self.shape
        wide = np.int32 if np.prod(self.shape, dtype=object) < 2**31 else np.int64
        image = self.image.astype(wide)[:, None, None]
        own = jnp.arange(self.sets, dtype=wide).reshape(self.bins) if self.sets > 1 else 0
        return ((image * h + y) * w + x) * self.sets + own

    def summed(self, image: jax.Array) -> jax.Array:
        """The weighted sums over the bins: ``[K, bins, bins, channels]``."""
        table = self.table(image)

        def add(sums: jax.Array, y: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
            weight = weight[..., None]
            read = table.at[self.row(y, x)].get(mode="clip")
            return sums + jnp.where(weight != 0, read * weight, 0)

        zeros = jnp.zeros((len(self.image), *self.bins, table.shape[1]), table.dtype)
        return self.over(add, zeros)

    def spread(self, values: jax.Array) -> jax.Array:
        """The image in which each bin has added its ``values`` to all it reads, by weight."""

        def add(table: jax.Array, y: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
            return table.at[self.row(y, x)].add(values * weight[..., None], mode="drop")

        n, c, h, w = self.shape
        zeros = jnp.zeros((n * h * w * self.sets, c // self.sets), values.dtype)
        return self.of_table(self.over(add, zeros))


def _aligned(
    shape: tuple[int, ...],
    rois: jax.Array,
    scale: float,
    bins: tuple[int, int],
    ratio: int,
    *,
    offset: float,
    at_least: float | None = None,
    by_position: bool = False,
) -> Regions:
    corners = rois[:, 1:] * scale - offset
    start, length = corners[:, :2], corners[:, 2:] - corners[:, :2]
    if at_least is not None:
        length = jnp.maximum(length, at_least)
    lines = [
        _samples(start[:, [d]], length[:, [d]], n, ratio, size)
        for d, n, size in zip((1, 0), bins, shape[2:], strict=True)
    ]
    return Regions(shape, rois, (lines[0], lines[1]), bins, by_position)


def _pooled(
    shape: tuple[int, ...],
    rois: jax.Array,
    scale: float,
    bins: tuple[int, int],
    *,
    inclusive: bool,
    short: int = 0,
    by_position: bool = False,
) -> Regions:
    corners = lax.round(rois[:, 1:] * scale, lax.RoundingMethod.AWAY_FROM_ZERO)
    start, length = corners[:, :2], corners[:, 2:] - corners[:, :2] + inclusive
    lines = [
        _pixels(start[:, [d]], length[:, [d]], n, size - short)
        for d, n, size in zip((1, 0), bins, shape[2:], strict=True)
    ]
    return Regions(shape, rois, (lines[0], lines[1]), bins, by_position)


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
    return _aligned(shape, rois, scale, bins, ratio, offset=offset, at_least=at_least)


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
    regions = _aligned(
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
    regions = _aligned(
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
    regions = _pooled(image.shape, rois, spatial_scale, bins, inclusive=True)
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
    regions = _pooled(
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
    regions = _pooled(shape, rois, spatial_scale, bins, inclusive=False, by_position=True)
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
