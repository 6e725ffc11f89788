"""``grid_sampler``: reading images at fractional positions, and its gradients.

Each spatial dim of the grid gives a few *taps*: positions in the image, their weights, and how the
weights change with the grid. A sample is the sum over all combinations of taps. Conventions as in
torch's GridSampler.h: gradients are 0 where a coordinate is clipped, and change sign where it is
reflected.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.partitioned.per_slice import per_slice
from xla_dtensor.lowering.partitioned.scatter import write
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers

BILINEAR, NEAREST, BICUBIC = 0, 1, 2  # torch's GridSamplerInterpolation
ZEROS, BORDER, REFLECTION = 0, 1, 2  # torch's GridSamplerPadding
_KEYS = -0.75  # the parameter of the cubic convolution kernel


@dataclass(frozen=True)
class Tap:
    """One position per sample along one dim, ``[N, samples]`` all.

    Attributes:
        index: in range.
        valid: whether the image is read there; elsewhere it is 0.
        weight: of this position.
        slope: the derivative of the weight with respect to the grid's coordinate.
    """

    index: jax.Array
    valid: jax.Array
    weight: jax.Array
    slope: jax.Array


def _pixel(grid: jax.Array, size: int, align: bool) -> tuple[jax.Array, float]:
    """The grid's coordinates (-1 to 1) in pixels, and the derivative."""
    if align:
        return (grid + 1) / 2 * (size - 1), (size - 1) / 2
    return ((grid + 1) * size - 1) / 2, size / 2


def _clip(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    inside = (x > 0) & (x < size - 1)
    # A NaN becomes 0, as in torch.
    return jnp.where(x > 0, jnp.minimum(x, size - 1), 0), inside.astype(x.dtype)


def _reflect(x: jax.Array, twice_low: int, twice_high: int) -> tuple[jax.Array, jax.Array]:
    if twice_low == twice_high:
        return jnp.zeros_like(x), jnp.zeros_like(x)
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    distance, sign = jnp.abs(x - low), jnp.where(x - low < 0, -1, 1)
    extra = jnp.fmod(distance, jnp.asarray(span, x.dtype))
    even = jnp.floor(distance / span) % 2 == 0
    reflected = jnp.where(even, extra + low, span - extra + low)
    return reflected, jnp.where(even, sign, -sign).astype(x.dtype)


def _padded(x: jax.Array, size: int, padding: int, align: bool) -> tuple[jax.Array, jax.Array]:
    """``x`` moved into the image as ``padding`` says, and the derivative."""
    if padding == ZEROS:
        return x, jnp.ones_like(x)
    slope = jnp.ones_like(x)
    if padding == REFLECTION:
        x, slope = _reflect(x, 0, 2 * (size - 1)) if align else _reflect(x, -1, 2 * size - 1)
    x, clipped = _clip(x, size)
    return x, slope * clipped


def _tap(position: jax.Array, size: int, weight: jax.Array, slope: jax.Array) -> Tap:
    valid = (position >= 0) & (position <= size - 1)
    index = jnp.where(valid, position, 0).astype(np.int32)
    return Tap(index, valid, weight, slope)


def _taps(grid: jax.Array, size: int, mode: int, padding: int, align: bool) -> list[Tap]:
    x, scale = _pixel(grid, size, align)
    if mode == BICUBIC:
        return _cubic_taps(x, scale, size, padding, align)
    x, slope = _padded(x, size, padding, align)
    if mode == NEAREST:
        return [_tap(jnp.round(x), size, jnp.ones_like(x), jnp.zeros_like(x))]
    low = jnp.floor(x)
    slope = slope * scale
    return [
        _tap(low, size, low + 1 - x, -slope),
        _tap(low + 1, size, x - low, slope),
    ]


def _cubic_taps(x: jax.Array, scale: float, size: int, padding: int, align: bool) -> list[Tap]:
    low = jnp.floor(x)
    taps = []
    for offset in range(-1, 3):
        distance = jnp.abs(x - low - offset)
        sign = jnp.where(x - low - offset < 0, -1, 1)
        if offset in (0, 1):
            weight = ((_KEYS + 2) * distance - (_KEYS + 3)) * distance * distance + 1
            slope = (3 * (_KEYS + 2) * distance - 2 * (_KEYS + 3)) * distance
        else:
            weight = ((distance - 5) * distance + 8) * distance * _KEYS - 4 * _KEYS
            slope = ((3 * distance - 10) * distance + 8) * _KEYS
        position, _ = _padded(low + offset, size, padding, align)
        # Reflecting a whole number may leave it a rounding error off.
        taps.append(_tap(jnp.trunc(position), size, weight, slope * sign * scale))
    return taps


class _Sampler:
    """The taps of one call, over the flattened positions of grid and image."""

    def __init__(
        self, image: jax.Array, grid: jax.Array, mode: int, padding: int, align: bool
    ) -> None:
        self.sizes = image.shape[2:]
        self.batch, self.out = grid.shape[0], grid.shape[1:-1]
        wide = grid.astype(math_dtype(grid.dtype)).reshape(self.batch, -1, len(self.sizes))
        # The grid's last dim has x first; the image's dims end with it.
        self.taps = [
            _taps(wide[..., len(self.sizes) - 1 - d], size, mode, padding, align)
            for d, size in enumerate(self.sizes)
        ]

        combinations = list(itertools.product(*self.taps))
        stack = lambda values: jnp.concatenate(values, axis=1)
        self.by_dim = [
            Tap(
                *(
                    stack([getattr(taps[d], field) for taps in combinations])
                    for field in ("index", "valid", "weight", "slope")
                )
            )
            for d in range(len(self.sizes))
        ]
        """Per dim its taps, for all combinations one after the other: ``[N, all * samples]``."""
        self.count = len(combinations)
        self.flat = jnp.zeros((), np.int32)
        self.valid = jnp.ones((), bool)
        for tap, size in zip(self.by_dim, self.sizes, strict=True):
            self.flat, self.valid = self.flat * size + tap.index, self.valid & tap.valid

    def weights(self, without: int | None = None) -> jax.Array:
        """The product of the weights of all dims, or of all but one; 0 where nothing is read."""
        result = self.valid.astype(self.by_dim[0].weight.dtype)
        for d, tap in enumerate(self.by_dim):
            if d != without:
                result = result * tap.weight
        return result

    def read(self, image: jax.Array) -> jax.Array:
        """The image at all taps: ``[N, C, all * samples]``."""
        lines = image.reshape(*image.shape[:2], -1).astype(math_dtype(image.dtype))
        value = jnp.take_along_axis(lines, self.flat[:, None], axis=2, mode="clip")
        return jnp.where(self.valid[:, None], value, 0)

    def summed(self, values: jax.Array) -> jax.Array:
        """The sum over the combinations in the last dim of ``values``."""
        shape = (*values.shape[:-1], self.count, values.shape[-1] // self.count)
        return jnp.sum(values.reshape(shape), axis=-2)


@lowers("grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(
    image: jax.Array,
    grid: jax.Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> jax.Array:
    shape = (*image.shape[:2], *grid.shape[1:-1])
    if 0 in shape:
        return jnp.zeros(shape, image.dtype)
    sampler = _Sampler(image, grid, interpolation_mode, padding_mode, align_corners)
    return sampler.summed(sampler.read(image) * sampler.weights()[:, None]).reshape(shape)


def _scattered(sizes: Sequence[int], index: jax.Array, values: jax.Array) -> jax.Array:
    """The sum of ``values[n, i]`` at flat position ``index[n, i]`` of an image: ``[N, positions,
    C]``."""
    *lead, _, channels = values.shape
    values = values.reshape(-1, *values.shape[-2:])
    index = index.reshape(-1, index.shape[-1])
    images = jnp.arange(len(index), dtype=np.int32)[:, None]
    pixels = jnp.zeros((len(index), math.prod(sizes), channels), values.dtype)
    return write(pixels, (images, index), "add", values).reshape(*lead, -1, channels)


are(Kind.SLICED, "grid_sampler_2d_backward", "grid_sampler_3d_backward")


@lowers("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(
    grad: jax.Array,
    image: jax.Array,
    grid: jax.Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array]:
    wide = math_dtype(grad.dtype)
    batch, channels = image.shape[:2]
    if grad.size == 0:
        return jnp.zeros(image.shape, wide) if output_mask[0] else None, jnp.zeros(grid.shape, wide)
    sampler = _Sampler(image, grid, interpolation_mode, padding_mode, align_corners)
    grad = jnp.tile(grad.astype(wide).reshape(batch, channels, -1), (1, 1, sampler.count))
    grad_image = None
    if output_mask[0]:
        # [N, positions, C]: a scatter of whole pixels.
        share = jnp.swapaxes(sampler.weights()[:, None] * grad, 1, 2)
        pixels = per_slice(functools.partial(_scattered, sampler.sizes), 1, sampler.flat, share)
        grad_image = jnp.swapaxes(pixels, 1, 2).reshape(image.shape)
    along = jnp.sum(sampler.read(image) * grad, axis=1)
    by_dim = [
        sampler.summed(along * tap.slope * sampler.weights(without=d))
        for d, tap in enumerate(sampler.by_dim)
    ]
    return grad_image, jnp.stack(by_dim[::-1], axis=-1).reshape(grid.shape)
