"""The gamma function's relatives: digamma, polygamma, zeta, mvlgamma."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp

from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.partitioned.per_slice import elementwise
from xla_dtensor.lowering.promotion import promote_to_float
from xla_dtensor.lowering.registry import lowers


@lowers("digamma")
def digamma(x: jax.Array) -> jax.Array:
    """Reflected from negative ``x`` by the distance to the nearest pole, which is exact: JAX's
    loses precision there. At the poles as torch: infinite at 0, else NaN."""
    (x,) = promote_to_float(x)
    negative = x < 0
    distance = x - jnp.round(x)
    reflected = jnp.where(
        distance == 0, jnp.nan, math.pi / jnp.tan(math.pi * jnp.where(distance == 0, 1, distance))
    )
    out = jsp.digamma(jnp.where(negative, 1 - x, x)) - jnp.where(negative, reflected, 0)
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), out)


def _trigamma(x: jax.Array) -> jax.Array:
    """As torch: six steps of the recurrence, then four terms of the asymptotic series, reflected
    from ``x < 1/2``. Near the poles its rounding of ``pi x`` decides the digits."""
    low = x < 0.5
    y = jnp.where(low, 1 - x, x)
    sine = jnp.sin(math.pi * jnp.where(low, x, 0.5))
    total = jnp.where(low, -(math.pi**2) / (sine * sine), 0)
    for _ in range(6):
        total = total + 1 / (y * y)
        y = y + 1
    square = 1 / (y * y)
    series = 1 + 1 / (2 * y) + square * (1 / 6 - square * (1 / 30 - square * (1 / 42)))
    total = total + series / y
    return jnp.where(low, -total, total)


def _zeta(s: jax.Array, q: jax.Array) -> jax.Array:
    """Hurwitz zeta. JAX's expansion needs ``q`` above about -9: the first terms of a negative
    ``q`` are summed one by one, which torch does too (here at most 1000)."""
    regular = (q != jnp.floor(q)) & (s == jnp.floor(s))

    def pending(state: Any) -> Any:
        count, q, _ = state
        return (count < 1000) & jnp.any(regular & (q < 0))

    def add_term(state: Any) -> Any:
        count, q, total = state
        negative = regular & (q < 0)
        total = total + jnp.where(negative, jnp.power(q, -s), 0)
        return count + 1, jnp.where(negative, q + 1, q), total

    _, q, total = jax.lax.while_loop(pending, add_term, (0, q, jnp.zeros_like(q)))
    total = jnp.where((q <= 0) & (q == jnp.floor(q)), jnp.inf, total + jsp.zeta(s, q))
    return jnp.where(s < 1, jnp.nan, total)


are(Kind.SLICED, "special_zeta.*", "polygamma")


@lowers("special_zeta", "special_zeta.other_scalar", "special_zeta.self_scalar")
def zeta(s: Any, q: Any) -> jax.Array:
    return elementwise(_zeta, *promote_to_float(s, q))


@lowers("polygamma")
def polygamma(n: int, x: jax.Array) -> jax.Array:
    (x,) = promote_to_float(x)
    if n == 0:
        return digamma(x)
    if n == 1:
        return _trigamma(x)
    return (
        (-1) ** (n + 1)
        * float(math.factorial(n))
        * elementwise(_zeta, jnp.asarray(n + 1, x.dtype), x)
    )


@lowers("polygamma_")
def polygamma_(x: jax.Array, n: int) -> jax.Array:
    """The in-place overload has its arguments the other way round."""
    return polygamma(n, x)


@lowers("mvlgamma")
def mvlgamma(x: jax.Array, p: int) -> jax.Array:
    (x,) = promote_to_float(x)
    terms = sum(jax.lax.lgamma(x - 0.5 * j) for j in range(p))
    return terms + p * (p - 1) / 4 * math.log(math.pi)
