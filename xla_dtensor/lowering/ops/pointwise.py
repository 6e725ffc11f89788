"""Elementwise math: arithmetic, comparison, logic. Activations have their own file."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np

from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.ops.rounded import rounded
from xla_dtensor.lowering.partitioned.per_slice import elementwise
from xla_dtensor.lowering.promotion import (
    converted,
    is_exactly,
    math_dtype,
    promote,
    promote_for_math,
    promote_to_float,
    result_type,
)
from xla_dtensor.lowering.registry import lowers


def is_integral(x: jax.Array) -> bool:
    return np.dtype(x.dtype).kind in "biu"


def is_complex(x: jax.Array) -> bool:
    return np.dtype(x.dtype).kind == "c"


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """``x`` as ``dtype``; complex to real drops the imaginary part, as in torch."""
    if is_complex(x) and np.dtype(dtype).kind not in "cb":
        x = x.real
    return converted(x, dtype)


# Unary functions whose results are floating point, whatever the input.
_FLOAT_UNARY: dict[str, Callable[[jax.Array], jax.Array]] = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "deg2rad": jnp.deg2rad,
    "erf": jax.lax.erf,
    "erfc": jax.lax.erfc,
    "erfinv": jax.lax.erf_inv,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "i0": jsp.i0,
    "lgamma": jax.lax.lgamma,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "rad2deg": jnp.rad2deg,
    "reciprocal": lambda x: rounded("div", jnp.ones((), x.dtype), x),
    "rsqrt": lambda x: 1 / jnp.sqrt(x) if is_complex(x) else jax.lax.rsqrt(x),
    "sigmoid": jax.lax.logistic,
    "sin": jnp.sin,
    "sinc": jnp.sinc,
    "sinh": jnp.sinh,
    "special_entr": jsp.entr,
    "special_i0e": jsp.i0e,
    "special_i1": jsp.i1,
    "special_i1e": jsp.i1e,
    "special_log_ndtr": jsp.log_ndtr,
    "special_ndtri": jsp.ndtri,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
}

# Unary functions that keep the dtype and lose nothing in half precision.
_SAME_UNARY: dict[str, Callable[[jax.Array], jax.Array]] = {
    "abs": jnp.abs,
    "bitwise_not": jnp.bitwise_not,
    "clone": lambda x: x,
    "_lazy_clone": lambda x: x,
    "conj_physical": jnp.conj,
    "_conj_physical": jnp.conj,
    "logical_not": lambda x: x == 0,
    "neg": jnp.negative,
    "positive": lambda x: x,
    "square": jnp.square,
    "zero": jnp.zeros_like,
}

# Rounding functions, which leave integers alone.
_ROUNDING: dict[str, Callable[[jax.Array], jax.Array]] = {
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "round": jnp.round,
    "trunc": jnp.trunc,
}

_CLASSIFICATION: dict[str, tuple[Callable[[jax.Array], jax.Array], bool]] = {
    "isinf": (jnp.isinf, False),
    "isnan": (jnp.isnan, False),
    "isposinf": (jnp.isposinf, False),
    "isneginf": (jnp.isneginf, False),
    "isfinite": (jnp.isfinite, True),
}


def _register_unary() -> None:
    for name, function in _FLOAT_UNARY.items():
        lowers(name)(lambda x, f=function: f(*promote_to_float(x)))
    for name, function in _SAME_UNARY.items():
        lowers(name)(lambda x, memory_format=None, f=function: f(x))
    for name, function in _ROUNDING.items():
        lowers(name)(lambda x, f=function: x if is_integral(x) else f(x))
    for name, (function, of_integers) in _CLASSIFICATION.items():
        lowers(name)(
            lambda x, f=function, i=of_integers: jnp.full(x.shape, i) if is_integral(x) else f(x)
        )


_register_unary()


@lowers("sign")
def sign(x):
    if is_integral(x):
        return (x > 0).astype(x.dtype) if x.dtype == np.bool_ else jnp.sign(x)
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)  # 0 for NaN


@lowers("sgn")
def sgn(x):
    if not is_complex(x):
        return sign(x)
    magnitude = jnp.abs(x)
    return jnp.where(magnitude == 0, 0, x / jnp.where(magnitude == 0, 1, magnitude))


@lowers("signbit")
def signbit(x):
    return x < 0 if is_integral(x) else jnp.signbit(x)


@lowers("angle")
def angle(x):
    if is_complex(x):
        return jnp.angle(x)
    (x,) = promote_to_float(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, np.pi, 0.0))


@lowers("frac")
def frac(x):
    return x - jnp.trunc(x)


@lowers("frexp.Tensor")
def frexp(x):
    return jnp.frexp(x)


@lowers("round.decimals")
def round_decimals(x, *, decimals):
    if is_integral(x):
        return x
    (x,) = promote_for_math(x)
    scale = 10.0 ** abs(decimals)
    return jnp.round(x * scale) / scale if decimals >= 0 else jnp.round(x / scale) * scale


@lowers("special_erfcx")
def erfcx(x):
    """``exp(x^2) erfc(x)``; for large ``x`` the product is inf * 0, so a continued fraction."""
    (x,) = promote_to_float(x)
    large = x > 5
    safe = jnp.where(large, x, 6.0)
    tail = safe
    for k in range(20, 0, -1):
        tail = safe + k / 2 / tail
    near = jnp.exp(x * x) * jax.lax.erfc(jnp.minimum(x, 6.0))
    return jnp.where(large, 1 / (tail * math.sqrt(math.pi)), near)


@lowers("nan_to_num", symbolic_floats=True)
def nan_to_num(x, nan=None, posinf=None, neginf=None):
    if is_integral(x):
        return x
    if is_complex(x):
        parts = (nan_to_num(part, nan, posinf, neginf) for part in (x.real, x.imag))
        return jax.lax.complex(*parts)
    limits = jnp.finfo(x.dtype)
    x = jnp.where(jnp.isnan(x), jnp.asarray(0.0 if nan is None else nan, x.dtype), x)
    high = limits.max if posinf is None else posinf
    low = limits.min if neginf is None else neginf
    x = jnp.where(x == jnp.inf, jnp.asarray(high, x.dtype), x)
    return jnp.where(x == -jnp.inf, jnp.asarray(low, x.dtype), x)


# ------------------------------------------------------------------------------- arithmetic


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
    return [pow_scalar(x, exponent) for x in xs]


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


# ---------------------------------------------------------------------- binary float functions


def _xlogy(x: jax.Array, y: jax.Array, log: Callable = jnp.log) -> jax.Array:
    return jnp.where(jnp.isnan(y), y, jnp.where(x == 0, 0, x * log(jnp.where(x == 0, 1, y))))


def logaddexp(x: jax.Array, y: jax.Array) -> jax.Array:
    if not is_complex(x):
        return jnp.logaddexp(x, y)
    high, low = jnp.where(x.real >= y.real, x, y), jnp.where(x.real >= y.real, y, x)
    result = high + jnp.log1p(jnp.exp(low - high))
    return jnp.where(jnp.isinf(high.real) & (high == low), high, result)


_FLOAT_BINARY: dict[tuple[str, ...], Callable[[jax.Array, jax.Array], jax.Array]] = {
    ("atan2",): jnp.arctan2,
    ("copysign.Tensor", "copysign.Scalar"): jnp.copysign,
    ("hypot",): jnp.hypot,
    ("ldexp.Tensor",): lambda x, y: x * jnp.exp2(y),
    ("igamma",): functools.partial(elementwise, jax.lax.igamma),
    ("igammac",): functools.partial(elementwise, jax.lax.igammac),
    ("logaddexp",): logaddexp,
    ("logaddexp2",): jnp.logaddexp2,
    ("special_xlog1py", "special_xlog1py.other_scalar", "special_xlog1py.self_scalar"): (
        lambda x, y: _xlogy(x, y, jnp.log1p)
    ),
    ("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self"): _xlogy,
}

# Exact in any dtype: computed in the promoted one.
_SAME_BINARY: dict[tuple[str, ...], Callable[[jax.Array, jax.Array], jax.Array]] = {
    ("fmax",): jnp.fmax,
    ("fmin",): jnp.fmin,
    ("gcd",): functools.partial(elementwise, jnp.gcd),
    ("heaviside",): lambda x, y: jnp.where(x == 0, y, (x > 0).astype(x.dtype)),
    ("lcm",): functools.partial(elementwise, jnp.lcm),
    ("maximum", "max.other"): jnp.maximum,
    ("minimum", "min.other"): jnp.minimum,
    ("nextafter",): jnp.nextafter,
}

are(Kind.SLICED, "igamma", "igammac", "gcd", "lcm")

_COMPARISON = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}
_BITWISE = {
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
}
_LOGICAL = {
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
}


def _register_binary() -> None:
    for names, function in _FLOAT_BINARY.items():
        lowers(*names)(lambda x, y, f=function: f(*jnp.broadcast_arrays(*promote_to_float(x, y))))
    for names, function in _SAME_BINARY.items():
        lowers(*names)(lambda x, y, f=function: f(*promote(x, y)))
    for name, function in _COMPARISON.items():
        lowers(f"{name}.Tensor", f"{name}.Scalar")(lambda x, y, f=function: f(*promote(x, y)))
    for name, function in _BITWISE.items():
        lowers(f"{name}.Tensor", f"{name}.Scalar", f"{name}.Scalar_Tensor")(
            lambda x, y, f=function: f(*promote(x, y))
        )
    for name, function in _LOGICAL.items():
        lowers(name)(lambda x, y, f=function: f(x != 0, y != 0))


_register_binary()


def _shift(x: jax.Array, y: jax.Array, shift: Callable, beyond: jax.Array) -> jax.Array:
    """``shift(x, y)``, with torch's result for a negative or too large ``y``."""
    defined = (y >= 0) & (y < np.iinfo(x.dtype).bits)
    return jnp.where(defined, shift(x, jnp.where(defined, y, 0)), beyond)


@lowers(
    "bitwise_left_shift.Tensor",
    "bitwise_left_shift.Tensor_Scalar",
    "bitwise_left_shift.Scalar_Tensor",
    "__lshift__.Tensor",
    "__lshift__.Scalar",
)
def left_shift(x, y):
    x, y = promote(x, y)
    return _shift(x, y, jnp.left_shift, jnp.zeros_like(x))


@lowers(
    "bitwise_right_shift.Tensor",
    "bitwise_right_shift.Tensor_Scalar",
    "bitwise_right_shift.Scalar_Tensor",
    "__rshift__.Tensor",
    "__rshift__.Scalar",
)
def right_shift(x, y):
    x, y = promote(x, y)
    return _shift(x, y, jnp.right_shift, jnp.where(x < 0, -1, 0).astype(x.dtype))


# -------------------------------------------------------------------------- selection, copying


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
