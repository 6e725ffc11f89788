"""Histograms: an element is counted by comparing its bin with every bin's number.

That needs no scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.ops.factory import line
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers


def _counts(bins: jax.Array, weight: jax.Array | None, size: int) -> jax.Array:
    """How many of ``bins``, or what weight, fall in each of ``size`` bins; -1 is in none."""
    one_hot = bins[:, None] == jnp.arange(size)
    if weight is None:
        return jnp.sum(one_hot, 0)
    return jnp.sum(jnp.where(one_hot, weight.reshape(-1)[:, None], 0), 0)


def _spread(x: jax.Array, widening: float) -> tuple[jax.Array, jax.Array]:
    """The least and the largest element, or ``widening`` around a single one."""
    if x.size == 0:
        return jnp.zeros((), x.dtype), jnp.ones((), x.dtype)
    low, high = jnp.min(x), jnp.max(x)
    same = low == high
    return jnp.where(same, low - widening, low), jnp.where(same, high + widening, high)


@lowers("histc")
def histc(x: jax.Array, bins: int = 100, min: Any = 0, max: Any = 0) -> jax.Array:
    # In half precision torch rounds after every operation: that decides the bin.
    half = None if x.dtype == math_dtype(x.dtype) else jnp.finfo(x.dtype)

    def rounded(value: jax.Array) -> jax.Array:
        return value if half is None else lax.reduce_precision(value, half.nexp, half.nmant)

    x = x.reshape(-1).astype(math_dtype(x.dtype))
    low, high = jnp.asarray(min).astype(x.dtype), jnp.asarray(max).astype(x.dtype)
    least, largest = _spread(x, 1)
    low, high = jnp.where(low == high, least, low), jnp.where(low == high, largest, high)
    if x.dtype.kind == "f":
        position = rounded(rounded(rounded(x - low) * bins) / rounded(high - low))
        position = jnp.floor(position)
    else:
        position = (x - low) * bins // (high - low)
    inside = (x >= low) & (x <= high)
    position = jnp.clip(jnp.where(inside, position, 0), 0, bins - 1).astype(np.int64)
    return _counts(jnp.where(inside, position, -1), None, bins)


def _bins(x: jax.Array, edges: jax.Array) -> jax.Array:
    """The bin of each element of ``x`` between sorted ``edges``, the last one closed, or -1."""
    count = edges.shape[0] - 1
    below = jnp.sum(edges[None] <= x[:, None], 1) - 1
    position = jnp.where(x == edges[-1], count - 1, below)
    return jnp.where((x >= edges[0]) & (x <= edges[-1]), position, -1)


def _edges(x: jax.Array, bins: Sequence[int], range: Sequence[float] | None) -> list[jax.Array]:
    """``bins[d]`` even bins of each column of ``x [points, dims]``."""
    result = []
    for d, count in enumerate(bins):
        if range is None:
            low, high = _spread(x[:, d], 0.5)
        else:
            first, last = range[2 * d : 2 * d + 2]
            if first == last:
                first, last = first - 0.5, last + 0.5
            low, high = jnp.asarray(first, x.dtype), jnp.asarray(last, x.dtype)
        result.append(line(low, high, count + 1, x.dtype))
    return result


def _histogram(
    x: jax.Array, edges: Sequence[jax.Array], weight: jax.Array | None, density: bool
) -> jax.Array:
    """Of points ``x [points, dims]``."""
    shape = [e.shape[0] - 1 for e in edges]
    flat, inside = jnp.zeros(x.shape[0], np.int64), jnp.ones(x.shape[0], bool)
    for d, (e, count) in enumerate(zip(edges, shape, strict=True)):
        bins = _bins(x[:, d], e)
        flat, inside = flat * count + bins, inside & (bins >= 0)
    total = int(np.prod(shape))
    out = _counts(jnp.where(inside, flat, -1), weight, total).astype(x.dtype).reshape(shape)
    if density:
        out = out / jnp.sum(out)
        for d, e in enumerate(edges):
            widths = e[1:] - e[:-1]
            out = out / widths.reshape([-1 if i == d else 1 for i in np.arange(len(shape))])
    return out


@lowers("histogram.bins_tensor")
def histogram_of_bins(
    x: jax.Array, bins: jax.Array, *, weight: jax.Array | None = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _histogram(x.reshape(-1, 1), [bins], weight, density), bins


@lowers("histogram.bin_ct")
def histogram(
    x: jax.Array,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> tuple[jax.Array, jax.Array]:
    x = x.reshape(-1, 1)
    edges = _edges(x, [bins], range)
    return _histogram(x, edges, weight, density), edges[0]


def _points(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


@lowers("_histogramdd_bin_edges")
def histogramdd_bin_edges(
    x: jax.Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> list[jax.Array]:
    return _edges(_points(x), bins, range)


@lowers("_histogramdd_from_bin_cts")
def histogramdd(
    x: jax.Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> jax.Array:
    x = _points(x)
    return _histogram(x, _edges(x, bins, range), weight, density)


@lowers("_histogramdd_from_bin_tensors")
def histogramdd_of_bins(
    x: jax.Array,
    bins: Sequence[jax.Array],
    *,
    weight: jax.Array | None = None,
    density: bool = False,
) -> jax.Array:
    return _histogram(_points(x), bins, weight, density)


# torch has no meta kernels of these. The numbers of bins are all that decides.


@meta_of("histogram.bins_tensor")
def _histogram_of_bins_meta(x: torch.Tensor, bins: torch.Tensor, **_: Any) -> Any:
    return x.new_empty(len(bins) - 1), x.new_empty(len(bins))


@meta_of("histogram.bin_ct")
def _histogram_meta(x: torch.Tensor, bins: int = 100, **_: Any) -> Any:
    return x.new_empty(bins), x.new_empty(bins + 1)


@meta_of("_histogramdd_bin_edges")
def _histogramdd_bin_edges_meta(x: torch.Tensor, bins: Sequence[int], **_: Any) -> Any:
    return [x.new_empty(count + 1) for count in bins]


@meta_of("_histogramdd_from_bin_cts")
def _histogramdd_meta(x: torch.Tensor, bins: Sequence[int], **_: Any) -> Any:
    return x.new_empty(list(bins))


@meta_of("_histogramdd_from_bin_tensors")
def _histogramdd_of_bins_meta(x: torch.Tensor, bins: Sequence[torch.Tensor], **_: Any) -> Any:
    return x.new_empty([len(edges) - 1 for edges in bins])
