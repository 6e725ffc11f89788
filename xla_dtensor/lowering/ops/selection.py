"""Elements chosen by a condition, clamped, filled, copied and converted."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.lowering.promotion import (
    cast,
    promote,
    promote_for_math,
)
from xla_dtensor.lowering.registry import lowers


@lowers("where.self")
def where(condition, x, y):
    x, y = promote(x, y)
    return jnp.where(condition != 0, x, y)


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(x, mask, value):
    return jnp.where(mask, cast(jnp.asarray(value), x.dtype), x)


@lowers("clamp", "clamp.Tensor", "clip", "clip.Tensor")
def clamp(x, min=None, max=None):
    operands = promote(*(v for v in (x, min, max) if v is not None))
    x, bounds = operands[0], list(operands[1:])
    if min is not None:
        x = jnp.maximum(x, bounds.pop(0))
    if max is not None:
        x = jnp.minimum(x, bounds.pop(0))
    return x


@lowers("clamp_min", "clamp_min.Tensor")
def clamp_min(x, min):
    return clamp(x, min)


@lowers("clamp_max", "clamp_max.Tensor")
def clamp_max(x, max):
    return clamp(x, None, max)


@lowers("isin.Tensor_Tensor", "isin.Tensor_Scalar", "isin.Scalar_Tensor")
def isin(elements, tests, *, assume_unique=False, invert=False):
    elements, tests = promote(elements, tests)
    return jnp.isin(elements, tests, invert=invert)


@lowers("_to_copy")
def to_copy(x, *, dtype=None):
    return x if dtype is None else cast(x, to_jax_dtype(dtype))


@lowers("copy")
def copy(x, source, non_blocking=False):
    return jnp.broadcast_to(cast(source, x.dtype), x.shape)


@lowers("fill.Scalar", "fill.Tensor")
def fill(x, value):
    return jnp.broadcast_to(cast(jnp.asarray(value), x.dtype), x.shape)


@lowers("complex")
def complex_(real, imag):
    return jax.lax.complex(*jnp.broadcast_arrays(*promote_for_math(real, imag)))


@lowers("polar")
def polar(magnitude, angle):
    magnitude, angle = promote_for_math(magnitude, angle)
    return jax.lax.complex(magnitude * jnp.cos(angle), magnitude * jnp.sin(angle))
