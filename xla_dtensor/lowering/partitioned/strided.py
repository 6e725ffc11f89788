"""Strided slices of a dim and their transpose, in the form that XLA partitions right.

XLA's partitioner gets two things wrong about strides (`base/xla_faults.py:STRIDES`): padding
*between* elements, which JAX makes of a strided slice when it transposes one, and slices that take
one element with a stride. So both have a primitive of their own here, whose transpose pads a dim
of length 1; as have slices without a stride, whose transpose is a pad (`padding.py`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from xla_dtensor.lowering.partitioned.cut import is_hidden
from xla_dtensor.lowering.partitioned.padding import padded


def strided_slice(x: jax.Array, dim: int, start: int, count: int, step: int) -> jax.Array:
    """``count`` positions of ``dim`` (at least one), every ``step``-th from ``start`` on."""
    step = 1 if count == 1 else step
    if count == x.shape[dim]:
        return x
    hidden = step == 1 and is_hidden(x.shape[dim : dim + 1], [start], [start + count])
    return _primitive.bind(x, dim=dim, start=start, count=count, step=step, hidden=hidden)


def spread(value: jax.Array, dim: int, start: int, step: int, size: int) -> jax.Array:
    """What ``strided_slice`` takes from: zeros of ``size`` positions of ``dim``, with ``value`` at
    every ``step``-th of them from ``start`` on."""
    length = value.shape[dim]
    if length > 1 and step > 1:
        value = _padded(jnp.expand_dims(value, dim + 1), dim + 1, 0, step - 1)
        value = value.reshape(*value.shape[:dim], length * step, *value.shape[dim + 2 :])
        # Fewer than ``step`` positions may come after the last one.
        length = min(length * step, size - start)
        value = lax.slice_in_dim(value, 0, length, axis=dim)
    return _padded(value, dim, start, size - start - length)


def _padded(value: jax.Array, dim: int, before: int, after: int) -> jax.Array:
    return padded(value, [(before, after) if d == dim else (0, 0) for d in range(value.ndim)])


def _sliced(
    x: jax.Array, *, dim: int, start: int, count: int, step: int, hidden: bool
) -> jax.Array:
    out = lax.slice_in_dim(x, start, start + (count - 1) * step + 1, step, dim)
    return lax.optimization_barrier(out) if hidden else out


def _transpose(cotangent: Any, x: Any, *, dim: int, start: int, step: int, **_: Any) -> Any:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval)]
    return [spread(cotangent, dim, start, step, x.aval.shape[dim])]


def _batch(values: Any, dims: Any, *, dim: int, **params: int) -> Any:
    (x,), (lead,) = values, dims
    return _primitive.bind(x, dim=dim + (lead <= dim), **params), lead


_primitive = Primitive("strided_slice")
_primitive.def_impl(jax.jit(_sliced, static_argnames=("dim", "start", "count", "step", "hidden")))
_primitive.def_abstract_eval(
    lambda x, *, dim, count, **_: x.update(shape=(*x.shape[:dim], count, *x.shape[dim + 1 :]))
)
mlir.register_lowering(_primitive, mlir.lower_fun(_sliced, multiple_results=False))
ad.deflinear2(_primitive, _transpose)
batching.primitive_batchers[_primitive] = _batch
