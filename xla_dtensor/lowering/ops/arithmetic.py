"""Sums, products, quotients, powers and remainders, element by element."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering.ops.for_each import once_for_each
from xla_dtensor.lowering.ops.rounded import rounded
from xla_dtensor.lowering.promotion import (
    is_exactly,
    is_integral,
    math_dtype,
    promote,
    promote_for_math,
    promote_to_float,
    result_type,
)
from xla_dtensor.lowering.registry import lowers


@lowers("add.Tensor", "add.Scalar")
def add(x, y, alpha=1):
    if _are_half(x, y) and is_exactly(alpha, 1):
        # As rounded as a sum in float32, which has more than twice their digits. XLA sees that what
        # devices add up, and then is added, can be added first: gradients of one tensor.
        return x + y
    number = _is_number(y)
    x, y = _terms(x, y, alpha)
    return rounded("add", x, y) if number else x + y


def _terms(x, y, alpha):
    """``x`` and ``alpha * y``. Of half precision torch rounds numbers before it adds."""
    x, y = promote(x, y)
    wide = math_dtype(x.dtype)
    if wide != x.dtype and not is_exactly(alpha, 1):
        alpha = jnp.asarray(alpha).astype(x.dtype).astype(wide)
    return x.astype(wide), y.astype(wide) * alpha


def _is_number(x):
    """Whether it is a number of the program's, which XLA may compute with when it compiles."""
    return isinstance(x, int | float)


def _are_half(x, y):
    """Whether both are tensors of one floating dtype that torch computes in float32."""
    dtypes = getattr(x, "dtype", None), getattr(y, "dtype", None)
    return dtypes[0] == dtypes[1] and dtypes[0] in _HALF


_HALF = (np.dtype(jnp.bfloat16), np.dtype(np.float16))


@lowers("sub.Tensor", "sub.Scalar")
def sub(x, y, alpha=1):
    if any(isinstance(v, bool) or getattr(v, "dtype", None) == np.bool_ for v in (x, y)):
        raise RuntimeError(
            "Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying "
            "to invert a mask, use the `~` or `logical_not()` operator instead."
        )
    number = _is_number(x) or _is_number(y)
    x, y = _terms(x, y, alpha)
    return rounded("sub", x, y) if number else x - y


@lowers("rsub.Tensor", "rsub.Scalar")
def rsub(x, y, alpha=1):
    return sub(y, x, alpha)


@lowers("mul.Tensor", "mul.Scalar")
def mul(x, y):
    x, y = promote_for_math(x, y)
    return rounded("mul", x, y)


@lowers("div.Tensor", "div.Scalar", "true_divide.Tensor", "true_divide.Scalar")
def div(x, y):
    return rounded("div", *promote_to_float(x, y))


@lowers("div.Tensor_mode", "div.Scalar_mode")
def div_mode(x, y, *, rounding_mode=None):
    if rounding_mode is None:
        return div(x, y)
    if rounding_mode == "floor":
        return floor_divide(x, y)
    dtype = result_type(x, y)
    x, y = promote_for_math(x, y)
    if is_integral(x):
        return jax.lax.div(*jnp.broadcast_arrays(x, y))
    # torch rounds the quotient to the result's dtype before it truncates.
    limits = jnp.finfo(dtype)
    quotient = jax.lax.reduce_precision(rounded("div", x, y), limits.nexp, limits.nmant)
    return jnp.trunc(quotient)


@lowers("floor_divide", "floor_divide.Scalar")
def floor_divide(x, y):
    x, y = promote_for_math(x, y)
    if is_integral(x):
        return jnp.floor_divide(x, y)
    # From the remainder, which is exact: floor(x / y) alone is off by one where x / y rounds up.
    remainder_ = jax.lax.rem(*jnp.broadcast_arrays(x, y))
    quotient = (x - remainder_) / y
    quotient = quotient - ((remainder_ != 0) & ((y < 0) != (remainder_ < 0)))
    rounded = jnp.floor(quotient)
    rounded = rounded + (quotient - rounded > 0.5)
    rounded = jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(quotient), x / y), rounded)
    return jnp.where(y == 0, x / y, rounded)


@lowers("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(x, y):
    return jnp.remainder(*promote_for_math(x, y))


@lowers("fmod.Tensor", "fmod.Scalar")
def fmod(x, y):
    return jax.lax.rem(*jnp.broadcast_arrays(*promote_for_math(x, y)))


@lowers("pow.Tensor_Tensor", "pow.Scalar")
def pow_tensor(x, y):
    x, y = promote_for_math(x, y)
    if x.dtype == np.bool_:
        return x | ~y
    if not is_integral(x):
        return jnp.power(x, y)
    if np.dtype(y.dtype).kind == "u":
        return jnp.power(x, y)
    # 1 / x**-y, truncated: not 0 only for x = 1 and -1.
    inverse = jnp.where(x == 1, 1, jnp.where(x == -1, 1 - 2 * (y & 1), 0))
    return jnp.where(y < 0, inverse, jnp.power(x, jnp.maximum(y, 0))).astype(x.dtype)


def _has_own_power(name: str, exponent: Any) -> bool:
    """Whether a power is computed in another way than the general one."""
    return isinstance(exponent, int) or any(exponent == y for y in _OWN_POWERS)


_OWN_POWERS = (2.0, 0.5, -0.5, 1.0, 0.0, -1.0, 3.0, -2.0, -3.0)


@lowers("pow.Tensor_Scalar", static_scalars=_has_own_power)
def pow_scalar(x, y):
    """``x**2`` is a multiplication, far cheaper than a general power."""
    base, _ = promote_for_math(x, y)
    if isinstance(y, jax.core.Tracer):
        return pow_tensor(x, y)
    if isinstance(y, bool | int) or (isinstance(y, float) and y.is_integer() and abs(y) <= 3):
        if is_integral(base) and y < 0:
            raise RuntimeError("Integers to negative integer powers are not allowed.")
        if y in (2, 3):  # as one product after the other, whatever is computed with it
            return functools.reduce(functools.partial(rounded, "mul"), [base] * int(y))
        return jax.lax.integer_pow(base.astype(np.int64) if base.dtype == bool else base, int(y))
    if y == 0.5:
        return jnp.sqrt(base)
    if y == -0.5:
        return 1 / jnp.sqrt(base)
    return pow_tensor(x, y)


# torch's decomposition calls the above, with numbers that must be static here, too.
@lowers("_foreach_pow.Scalar", static_scalars=_has_own_power)
def foreach_pow(xs, exponent):
    return once_for_each(functools.partial(pow_scalar, y=exponent), xs)


@lowers("_foreach_pow.ScalarList", static_scalars=True)
def foreach_pow_each(xs, exponent):
    return [pow_scalar(x, y) for x, y in zip(xs, exponent, strict=True)]


@lowers("addcmul")
def addcmul(x, y, z, *, value=1):
    x, y, z = promote_for_math(x, y, z)
    return x + value * y * z


@lowers("addcdiv")
def addcdiv(x, y, z, *, value=1):
    x, y, z = promote_to_float(x, y, z)
    return x + value * y / z


@lowers("lerp.Scalar", "lerp.Tensor")
def lerp(start, end, weight):
    start, end = promote_for_math(start, end)
    weight = jnp.asarray(weight).astype(start.dtype)
    # From the nearer end, so that weight 0 and 1 give start and end exactly.
    return jnp.where(
        jnp.abs(weight) < 0.5,
        start + weight * (end - start),
        end - (end - start) * (1 - weight),
    )
