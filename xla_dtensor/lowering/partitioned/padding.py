"""Padding and cropping, in the form that XLA partitions right.

XLA's partitioner computes pads of negative width wrong (`base/xla_faults.py:CROPS`), which are also
what JAX makes of a pad when it transposes one. So a crop is a slice here, and a pad has a primitive
of its own, whose transpose is a slice. It makes one pad of a pad and a slice of it, too, and
computes that wrong if the slice has nothing but padding (`SLICED_PADDING`). So what is padded goes
through a selection, which hides the pad.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from xla_dtensor.lowering.context import here
from xla_dtensor.lowering.partitioned.cut import cut

Widths = Sequence[tuple[int, int]]


def padded(x: jax.Array, widths: Widths, value: Any = 0) -> jax.Array:
    """``x`` with ``(before, after)`` more positions in each dim, which are ``value``, or fewer
    where a width is negative."""
    start, stop, more = [], [], []
    for n, (before, after) in zip(x.shape, widths, strict=True):
        first = min(max(-before, 0), n)
        last = max(n + min(after, 0), first)
        start.append(first)
        stop.append(last)
        # Where nothing is left, the rest of the widths is taken from what is added.
        added = (max(before, 0), max(after, 0)) if last > first else (n + before + after, 0)
        more.append(added)
    kept = cut(x, start, stop)
    if not np.any(more):
        return kept
    out = _primitive.bind(kept, widths=tuple(more))
    # The selection below is for the partitioner's sake, which one device hasn't.
    if here().devices == 1 and isinstance(value, (int, float)) and value == 0:
        return out
    conditions = []
    for dim, (before, after) in enumerate(more):
        shape = [size if d == dim else 1 for d, size in enumerate(out.shape)]
        position = lax.broadcasted_iota(np.int32, shape, dim)
        conditions += [position >= before] if before else []
        conditions += [position < shape[dim] - after] if after else []
    inside = functools.reduce(jnp.logical_and, conditions)
    return jnp.where(inside, out, jnp.asarray(value).astype(x.dtype))


def _pad(x: jax.Array, *, widths: tuple[tuple[int, int], ...]) -> jax.Array:
    return lax.pad(x, np.zeros((), x.dtype), [(before, after, 0) for before, after in widths])


def _transpose(cotangent: Any, x: Any, *, widths: tuple[tuple[int, int], ...]) -> Any:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval)]
    return [padded(cotangent, [(-before, -after) for before, after in widths])]


def _batch(values: Any, dims: Any, *, widths: tuple[tuple[int, int], ...]) -> Any:
    (x,), (lead,) = values, dims
    return _primitive.bind(x, widths=(*widths[:lead], (0, 0), *widths[lead:])), lead


_primitive = Primitive("padded")
_primitive.def_impl(jax.jit(_pad, static_argnames="widths"))
_primitive.def_abstract_eval(
    lambda x, *, widths: x.update(
        shape=tuple(n + sum(pair) for n, pair in zip(x.shape, widths, strict=True))
    )
)
mlir.register_lowering(_primitive, mlir.lower_fun(_pad, multiple_results=False))
ad.deflinear2(_primitive, _transpose)
batching.primitive_batchers[_primitive] = _batch
