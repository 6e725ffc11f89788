"""Fractional max pooling: windows at random positions, which are given as random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.nn.pooling import max_pool_backward
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers

Ints = Sequence[int]


@meta_of("fractional_max_pool3d_backward")
def _(grad: Any, x: Any, *rest: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _starts(sample: jax.Array, size: int, out: int, kernel: int) -> jax.Array:
    """``[N, C, out]``: where the windows of one dim start, as torch derives it from a number in
    [0, 1) for each channel; the last window ends with the dim."""
    if out == 1:
        return jnp.full((*sample.shape, 1), size - kernel, np.int32)
    alpha = jnp.asarray(size - kernel, sample.dtype) / jnp.asarray(out - 1, sample.dtype)
    steps = jnp.arange(out - 1, dtype=sample.dtype)
    floor = lambda a: a.astype(np.int32)
    starts = floor((steps + sample[..., None]) * alpha) - floor(sample * alpha)[..., None]
    last = jnp.full((*sample.shape, 1), size - kernel, np.int32)
    return jnp.concatenate([starts, last], axis=-1)


def _fractional_max_pool(spatial: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def pool(
        x: jax.Array, kernel_size: Ints, output_size: Ints, random_samples: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        batched = x[None] if x.ndim == spatial + 1 else x
        if random_samples.dtype != x.dtype:  # torch's kernels say so, its meta kernels don't
            raise RuntimeError("Expect _random_samples to have the same dtype as input")
        sizes = batched.shape[2:]
        lead = batched.shape[:2]
        shape = (*x.shape[: x.ndim - spatial], *output_size)
        if 0 in shape:
            return jnp.zeros(shape, x.dtype), jnp.zeros(shape, np.int64)
        # Of more batches' numbers than there are torch takes the first.
        samples = random_samples[: lead[0]].astype(math_dtype(random_samples.dtype))
        # torch's numbers belong to the dims from the last on in 2-d, from the first on in 3-d.
        order = range(spatial) if spatial == 3 else reversed(range(spatial))
        # [N, C, outputs..., elements of the window...]
        flat = jnp.zeros((), np.int32)
        for d, number in enumerate(order):
            starts = _starts(samples[..., number], sizes[d], output_size[d], kernel_size[d])
            places = starts[..., None] + jnp.arange(kernel_size[d], dtype=np.int32)
            axes = [n for n in range(2 + 2 * spatial) if n not in (0, 1, 2 + d, 2 + spatial + d)]
            flat = flat * sizes[d] + jnp.expand_dims(places, axes)
        window = math.prod(kernel_size)
        flat = jnp.broadcast_to(flat, (*lead, *output_size, *kernel_size))
        flat = flat.reshape(*lead, -1)
        values = jnp.take_along_axis(batched.reshape(*lead, -1), flat, axis=2, mode="clip")
        values = values.reshape(*lead, -1, window)
        flat = flat.reshape(*lead, -1, window)
        # The first of equal maxima, the last NaN.
        order_nan = jnp.where(jnp.isnan(values), jnp.arange(window), -1)
        last_nan = jnp.max(order_nan, axis=-1)
        best = jnp.where(last_nan >= 0, last_nan, jnp.argmax(values, axis=-1))[..., None]
        pick = lambda a: jnp.take_along_axis(a, best, axis=-1, mode="clip").reshape(shape)
        return pick(values), pick(flat).astype(np.int64)

    return pool


for _n in (2, 3):
    lowers(f"fractional_max_pool{_n}d")(_fractional_max_pool(_n))
    lowers(f"fractional_max_pool{_n}d_backward")(max_pool_backward(_n))
    are(Kind.SLICED, f"fractional_max_pool{_n}d_backward")
