"""Regions of feature maps and their bins, which `region_operations` sums over.

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

from xla_dtensor.lowering.ops.rounded import rounded

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
    # Off by a bit, a bin of 3 pixels would be one of 3.0000002, and be read at one place more.
    return rounded("div", x, jnp.asarray(by, x.dtype))


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


def sampled(
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
    """Bins that are read at places between pixels.

    Args:
        shape: of the image.
        rois: ``[K, 5]``.
        scale: of the image's coordinates, over those of the regions.
        bins: how many along y and x.
        ratio: how many places each reads along a dim; as many as it is long if that isn't above 0.
        offset: where the middle of the first pixel is.
        at_least: how long regions are at least.
        by_position: whether each bin has channels of its own.
    """
    corners = rois[:, 1:] * scale - offset
    start, length = corners[:, :2], corners[:, 2:] - corners[:, :2]
    if at_least is not None:
        length = jnp.maximum(length, at_least)
    lines = [
        _samples(start[:, [d]], length[:, [d]], n, ratio, size)
        for d, n, size in zip((1, 0), bins, shape[2:], strict=True)
    ]
    return Regions(shape, rois, (lines[0], lines[1]), bins, by_position)


def pooled(
    shape: tuple[int, ...],
    rois: jax.Array,
    scale: float,
    bins: tuple[int, int],
    *,
    inclusive: bool,
    short: int = 0,
    by_position: bool = False,
) -> Regions:
    """Bins of whole pixels, as in `sampled`.

    Args:
        inclusive: whether the pixel of a region's second corner is in it.
        short: how many of the last rows and columns are in no bin.
    """
    corners = lax.round(rois[:, 1:] * scale, lax.RoundingMethod.AWAY_FROM_ZERO)
    start, length = corners[:, :2], corners[:, 2:] - corners[:, :2] + inclusive
    lines = [
        _pixels(start[:, [d]], length[:, [d]], n, size - short)
        for d, n, size in zip((1, 0), bins, shape[2:], strict=True)
    ]
    return Regions(shape, rois, (lines[0], lines[1]), bins, by_position)
