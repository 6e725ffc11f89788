"""Elementwise functions of one and two operands, most of them rows of tables.

Arithmetic, selection and activations have files of their own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np

from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.ops.rounded import rounded
from xla_dtensor.lowering.partitioned.per_slice import elementwise
from xla_dtensor.lowering.promotion import (
    is_complex,
    is_integral,
    promote,
    promote_for_math,
    promote_to_float,
)
from xla_dtensor.lowering.registry import lowers

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
