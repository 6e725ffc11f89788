"""Bessel and Airy functions, as Chebyshev interpolants.

XLA has few of these. The interpolants are of SciPy's functions, made in float64 on first use (SciPy
comes with JAX): one over the region around zero, where the function less its singular part is
smooth, and one in ``1/x`` beyond, where what is left after the asymptotic factor is (Abramowitz &
Stegun, chapters 9 and 10; DLMF 10.17, 10.40, 9.7).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np

from xla_dtensor.lowering.promotion import promote_to_float
from xla_dtensor.lowering.registry import lowers

# ------------------------------------------------------------------------ Chebyshev interpolants

_DEGREE = 48  # float64's precision for every function here; less is evaluated, see `_chebyshev`


@functools.cache
def _coefficients(name: str, low: float, high: float) -> np.ndarray:
    """Of the interpolant of ``_SMOOTH[name]`` over ``[low, high]``."""
    # The points are the middles of arcs: never the ends, where the singular parts cancel.
    angles = (np.arange(_DEGREE + 1) + 0.5) * np.pi / (_DEGREE + 1)
    with np.errstate(all="raise", under="ignore"):
        values = _SMOOTH[name]((low + high) / 2 + (high - low) / 2 * np.cos(angles))
    orders = np.arange(_DEGREE + 1)
    result = 2 / (_DEGREE + 1) * np.cos(np.outer(orders, angles)) @ values
    result[0] /= 2
    return result


def _chebyshev(name: str, x: jax.Array, low: float, high: float) -> jax.Array:
    """The smooth function ``name`` for ``x`` in ``[low, high]``, by Clenshaw's recurrence, with
    as many terms as the dtype of ``x`` resolves. Outside of the interval: some finite number."""
    coefficients = _coefficients(name, low, high)
    limit = float(np.finfo(x.dtype).eps) / 8 * np.abs(coefficients).max()
    count = int(np.nonzero(np.abs(coefficients) > limit)[0].max()) + 1
    t = (jnp.clip(x, low, high) * 2 - (low + high)) / (high - low)
    above = later = jnp.zeros_like(x)
    for c in coefficients[count - 1 : 0 : -1]:
        above, later = 2 * t * above - later + float(c), above
    return t * above - later + float(coefficients[0])


def _oscillating(first: Callable, second: Callable, phase: float, q: np.ndarray) -> Any:
    """``P`` and ``x Q`` (DLMF 10.17.3 and 10.17.4) of a Bessel function of the first kind and its
    second kind, at ``x = 1 / sqrt(q)``."""
    x = 1 / np.sqrt(q)
    angle, scale = x - phase, np.sqrt(np.pi * x / 2)
    j, y = first(x), second(x)
    p = scale * (j * np.cos(angle) + y * np.sin(angle))
    return p, x * scale * (y * np.cos(angle) - j * np.sin(angle))


def _airy_parts(q: np.ndarray) -> Any:
    """The factors of sin and cos (DLMF 9.7.9) of Ai at ``-x``, ``x = q**(-1/3)``: in
    ``q = 1 / x**3``, the second over ``q**(1/2)``."""
    from scipy.special import airy

    x = q ** (-1 / 3)
    angle = 2 / 3 * x**1.5 + np.pi / 4
    scale = np.sqrt(np.pi) * x**0.25
    ai, _, bi, _ = airy(-x)
    s, c = ai * scale, bi * scale
    sine = s * np.sin(angle) + c * np.cos(angle)
    cosine = s * np.cos(angle) - c * np.sin(angle)
    return sine, cosine / np.sqrt(q)


def _smooth_functions() -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """What is interpolated, by name."""

    def scipy(name: str) -> Callable:
        def call(x: np.ndarray, *args: Any) -> Any:
            import scipy.special

            return getattr(scipy.special, name)(x, *args)

        return call

    j0, j1, y0, y1, k0, k1 = map(scipy, ("j0", "j1", "y0", "y1", "k0", "k1"))
    i0, i1, k0e, k1e, airy = map(scipy, ("i0", "i1", "k0e", "k1e", "airy"))
    root = np.sqrt
    return {
        # of z = x**2
        "j0": lambda z: j0(root(z)),
        "j1": lambda z: j1(root(z)) / root(z),
        "y0": lambda z: y0(root(z)) - 2 / np.pi * np.log(root(z)) * j0(root(z)),
        "y1": lambda z: (
            (y1(root(z)) - 2 / np.pi * (np.log(root(z)) * j1(root(z)) - 1 / root(z))) / root(z)
        ),
        "k0": lambda z: k0(root(z)) + np.log(root(z) / 2) * i0(root(z)),
        "k1": lambda z: (k1(root(z)) - np.log(root(z) / 2) * i1(root(z))) * root(z),
        # of q = 1 / x**2
        "p0": lambda q: _oscillating(j0, y0, np.pi / 4, q)[0],
        "q0": lambda q: _oscillating(j0, y0, np.pi / 4, q)[1],
        "p1": lambda q: _oscillating(j1, y1, 3 * np.pi / 4, q)[0],
        "q1": lambda q: _oscillating(j1, y1, 3 * np.pi / 4, q)[1],
        # of q = 1 / x
        "k0e": lambda q: k0e(1 / q) / root(q),
        "k1e": lambda q: k1e(1 / q) / root(q),
        # Airy: of x; of 1 / zeta; of 1 / x**3
        "airy": lambda x: airy(x)[0],
        "airye": lambda q: _scaled_airy(1 / q),
        "airy_sine": lambda q: _airy_parts(q)[0],
        "airy_cosine": lambda q: _airy_parts(q)[1],
    }


def _scaled_airy(zeta: np.ndarray) -> np.ndarray:
    """Ai(x) exp(zeta) x^(1/4) (DLMF 9.7.5) of ``zeta = 2/3 x^(3/2)``."""
    from scipy.special import airye

    x = (1.5 * zeta) ** (2 / 3)
    return airye(x)[0] * x**0.25


_SMOOTH = _smooth_functions()

# ----------------------------------------------------------------------------- Bessel functions

_NEAR = 8.0  # where J and Y go over to their asymptotic form


def _far(x: jax.Array, order: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scale times P, scale times Q, and the angle of J and Y for ``x > _NEAR``."""
    x = jnp.where(x > _NEAR, x, _NEAR)
    q = 1 / (x * x)
    p = _chebyshev(f"p{order}", q, 0.0, 1 / _NEAR**2)
    r = _chebyshev(f"q{order}", q, 0.0, 1 / _NEAR**2) / x
    scale = jnp.sqrt(2 / (math.pi * x))
    return scale * p, scale * r, x - (math.pi / 4 if order == 0 else 3 * math.pi / 4)


def _bessel_j(x: jax.Array, order: int) -> jax.Array:
    size = jnp.abs(x)
    p, q, angle = _far(size, order)
    near = _chebyshev(f"j{order}", jnp.minimum(size, _NEAR) ** 2, 0.0, _NEAR**2)
    if order == 1:
        near = near * size
    out = jnp.where(size > _NEAR, p * jnp.cos(angle) - q * jnp.sin(angle), near)
    out = jnp.where(jnp.isnan(x), x, out)
    return jnp.where(x < 0, -out, out) if order == 1 else out


def _bessel_y(x: jax.Array, order: int) -> jax.Array:
    p, q, angle = _far(x, order)
    near_x = jnp.where((x > 0) & (x < _NEAR), x, _NEAR)
    regular = _chebyshev(f"y{order}", near_x * near_x, 0.0, _NEAR**2)
    singular = jnp.log(near_x) * _bessel_j(near_x, order)
    if order == 1:
        regular, singular = regular * near_x, singular - 1 / near_x
    near = regular + 2 / math.pi * singular
    out = jnp.where(x > _NEAR, p * jnp.sin(angle) + q * jnp.cos(angle), near)
    out = jnp.where(x == 0, -jnp.inf, out)
    return jnp.where((x < 0) | jnp.isnan(x), jnp.nan, out)


def _bessel_k(x: jax.Array, order: int, scaled: bool) -> jax.Array:
    near_x = jnp.where((x > 0) & (x < 2), x, 2.0)
    regular = _chebyshev(f"k{order}", near_x * near_x, 0.0, 4.0)
    if order == 0:
        near = regular - jnp.log(near_x / 2) * jsp.i0(near_x)
    else:
        near = regular / near_x + jnp.log(near_x / 2) * jsp.i1(near_x)
    far_x = jnp.where(x > 2, x, 2.0)
    far = _chebyshev(f"k{order}e", 1 / far_x, 0.0, 0.5) / jnp.sqrt(far_x)
    if scaled:
        near = near * jnp.exp(near_x)
    else:
        far = far * jnp.exp(-far_x)
    out = jnp.where(x == 0, jnp.inf, jnp.where(x > 2, far, near))
    return jnp.where((x < 0) | jnp.isnan(x), jnp.nan, out)


def _airy_ai(x: jax.Array) -> jax.Array:
    right = jnp.where(x > 2, x, 2.0)
    zeta = 2 / 3 * right * jnp.sqrt(right)
    smooth = _chebyshev("airye", 1 / zeta, 0.0, 1 / (2 / 3 * 2**1.5))
    decaying = smooth * jnp.exp(-zeta) / jnp.sqrt(jnp.sqrt(right))

    left = jnp.where(x < -4, -x, 4.0)
    q = 1 / (left * left * left)
    angle = 2 / 3 * left * jnp.sqrt(left) + math.pi / 4
    sine = _chebyshev("airy_sine", q, 0.0, 1 / 64) * jnp.sin(angle)
    cosine = _chebyshev("airy_cosine", q, 0.0, 1 / 64) * jnp.sqrt(q) * jnp.cos(angle)
    waves = (sine + cosine) / (math.sqrt(math.pi) * jnp.sqrt(jnp.sqrt(left)))

    out = jnp.where(x > 2, decaying, jnp.where(x < -4, waves, _chebyshev("airy", x, -4.0, 2.0)))
    return jnp.where(jnp.isfinite(x), out, jnp.nan)


def _spherical_bessel_j0(x: jax.Array) -> jax.Array:
    small = jnp.abs(x) < 0.5
    square = jnp.where(small, x * x, 0)
    series = jnp.ones_like(x)
    for n in (15, 13, 11, 9, 7, 5, 3):  # of sin(x) / x
        series = 1 - series * square / (n * (n - 1))
    other = jnp.where(small, 1, x)
    return jnp.where(jnp.isinf(x), 0, jnp.where(small, series, jnp.sin(other) / other))


_BESSEL: dict[str, Callable[[jax.Array], jax.Array]] = {
    "special_airy_ai": _airy_ai,
    "special_bessel_j0": lambda x: _bessel_j(x, 0),
    "special_bessel_j1": lambda x: _bessel_j(x, 1),
    "special_bessel_y0": lambda x: _bessel_y(x, 0),
    "special_bessel_y1": lambda x: _bessel_y(x, 1),
    "special_modified_bessel_i0": jsp.i0,
    "special_modified_bessel_i1": jsp.i1,
    "special_modified_bessel_k0": lambda x: _bessel_k(x, 0, False),
    "special_modified_bessel_k1": lambda x: _bessel_k(x, 1, False),
    "special_scaled_modified_bessel_k0": lambda x: _bessel_k(x, 0, True),
    "special_scaled_modified_bessel_k1": lambda x: _bessel_k(x, 1, True),
    "special_spherical_bessel_j0": _spherical_bessel_j0,
}


def _register_bessel() -> None:
    for name, function in _BESSEL.items():
        lowers(name)(lambda x, f=function: f(*promote_to_float(x)))


_register_bessel()
