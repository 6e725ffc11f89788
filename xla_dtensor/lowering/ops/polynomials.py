"""Orthogonal polynomials: Chebyshev's, Hermite's, Laguerre's, Legendre's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.partitioned.per_slice import elementwise
from xla_dtensor.lowering.promotion import promote_to_float
from xla_dtensor.lowering.registry import lowers

# step(k, x, last, before) is the polynomial of degree k + 1.
_Step = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def _by_recurrence(x: jax.Array, n: jax.Array, first: jax.Array, step: _Step) -> jax.Array:
    """The polynomials of degrees ``n`` (1 and ``first`` are those of degrees 0 and 1; 0 for
    negative ``n``), by their three-term recurrence up to the highest degree."""
    highest = jnp.max(n, initial=0)

    def body(state: Any) -> Any:
        k, before, last = state
        following = step(k.astype(x.dtype), x, last, before)
        more = (k < n) & ~jnp.isnan(last)
        return k + 1, jnp.where(more, last, before), jnp.where(more, following, last)

    start = (jnp.ones((), n.dtype), jnp.ones_like(x), first)
    _, _, last = jax.lax.while_loop(lambda state: state[0] < highest, body, start)
    return jnp.where(n < 0, 0, jnp.where(n == 0, 1, last))


def _degrees(n: jax.Array) -> jax.Array:
    return jax.lax.convert_element_type(jnp.trunc(n), np.int64)


def _chebyshev_polynomial(kind: str, x: jax.Array, n: jax.Array) -> jax.Array:
    """Of the kinds t, u, v, w: inside (-1, 1) and for higher degrees, where the recurrence loses
    precision, by the definition in cos(n acos x). The switch-over degrees are torch's."""
    first = {"t": x, "u": 2 * x, "v": 2 * x - 1, "w": 2 * x + 1}[kind]
    direct = (jnp.abs(x) < 1) & (n > (6 if kind == "t" else 8))
    degree = jnp.where(direct, 0, n)
    out = _by_recurrence(x, degree, first, lambda k, x, last, before: 2 * x * last - before)
    angle = jnp.arccos(jnp.where(direct, x, 0))
    order = n.astype(x.dtype)
    if kind == "t":
        closed = jnp.cos(order * angle)
    elif kind == "u":
        closed = jnp.sin((order + 1) * angle) / jnp.sin(angle)
    elif kind == "v":
        closed = jnp.cos((order + 0.5) * angle) / jnp.cos(angle / 2)
    else:
        closed = jnp.sin((order + 0.5) * angle) / jnp.sin(angle / 2)
    sign = jnp.where((x > 0) | (n % 2 == 0), 1, -1).astype(x.dtype)
    wide = sign * (2 * order + 1)
    ends = {
        "t": sign,
        "u": sign * (order + 1),
        "v": jnp.where(x > 0, 1, wide),
        "w": jnp.where(x > 0, wide, sign),
    }[kind]
    out = jnp.where(direct, closed, out)
    return jnp.where((jnp.abs(x) == 1) & (n >= 0), ends, out)


def _hermite(x: jax.Array, n: jax.Array, scale: int) -> jax.Array:
    """Physicist's (scale 2) and probabilist's (scale 1); NaN beyond the degrees that torch
    computes."""
    highest = 512 if x.dtype == np.float64 else 128
    out = _by_recurrence(
        x,
        jnp.minimum(n, highest),
        scale * x,
        lambda k, x, last, before: scale * x * last - scale * k * before,
    )
    return jnp.where(n > highest, jnp.nan, out)


def _laguerre(x: jax.Array, n: jax.Array) -> jax.Array:
    out = _by_recurrence(
        x,
        n,
        1 - x,
        lambda k, x, last, before: ((2 * k + (1 - x)) * last - k * before) / (k + 1),
    )
    return jnp.where((x == 0) & (n >= 0), 1, out)


def _legendre(x: jax.Array, n: jax.Array) -> jax.Array:
    out = _by_recurrence(
        x, n, x, lambda k, x, last, before: ((2 * k + 1) * x * last - k * before) / (k + 1)
    )
    sign = jnp.where((x > 0) | (n % 2 == 0), 1, -1).astype(x.dtype)
    return jnp.where((jnp.abs(x) == 1) & (n >= 0), sign, out)


def _shifted(kind: str, x: jax.Array, n: jax.Array) -> jax.Array:
    return _chebyshev_polynomial(kind, 2 * x - 1, n)


_POLYNOMIALS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    **{f"chebyshev_polynomial_{k}": functools.partial(_chebyshev_polynomial, k) for k in "tuvw"},
    **{f"shifted_chebyshev_polynomial_{k}": functools.partial(_shifted, k) for k in "tuvw"},
    "hermite_polynomial_h": lambda x, n: _hermite(x, n, 2),
    "hermite_polynomial_he": lambda x, n: _hermite(x, n, 1),
    "laguerre_polynomial_l": _laguerre,
    "legendre_polynomial_p": _legendre,
}


def _register_polynomials() -> None:
    def evaluate(function: Callable, x: Any, n: Any) -> jax.Array:
        x, n = promote_to_float(x, n)
        return elementwise(function, x, _degrees(n))

    for name, function in _POLYNOMIALS.items():
        overloads = [f"special_{name}{suffix}" for suffix in (".default", ".x_scalar", ".n_scalar")]
        lowers(*overloads)(lambda x, n, f=function: evaluate(f, x, n))
        are(Kind.SLICED, *overloads)


_register_polynomials()
