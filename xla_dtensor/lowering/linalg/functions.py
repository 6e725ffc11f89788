"""Functions and products of matrices: the exponential, cross products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.partitioned.per_slice import per_slice
from xla_dtensor.lowering.promotion import promote, promote_for_math
from xla_dtensor.lowering.registry import lowers


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


# Bader, Blanes & Casas, "Computing the Matrix Exponential with an Optimized Taylor Polynomial
# Approximation" (2019), table 3: the Taylor polynomial of degree 18 in five products, as torch.
_TAYLOR_18 = (
    (0.0, -1.00365581030144618291e-01, -8.02924648241156932449e-03, -8.92138498045729985177e-04, 0),
    (
        *(0.0, 3.97849749499645077844e-01, 1.36783778460411720168e00),
        *(4.98289622525382669416e-01, -6.37898194594723280150e-04),
    ),
    (
        *(-1.09676396052962061844e01, 1.68015813878906206114e00, 5.71779846478865511061e-02),
        *(-6.98210122488052056106e-03, 3.34975017086070470649e-05),
    ),
    (
        *(-9.04316832390810593223e-02, -6.76404519071381882256e-02, 6.75961301770459654925e-02),
        *(2.95552570429315521194e-02, -1.39180257516060693404e-05),
    ),
    (
        0.0,
        0.0,
        -9.23364619367118555360e-02,
        -1.69364939002081722752e-02,
        -1.40086798182036094347e-05,
    ),
)
# Up to which 1-norm it is exact to rounding.
_TAYLOR_18_NORM = {4: 3.010066362817634e00, 8: 1.090863719290036e00}


are(Kind.SLICED, "linalg_matrix_exp", "linalg_ldl_factor_ex")


@lowers("linalg_matrix_exp")
def matrix_exp(a: jax.Array) -> jax.Array:
    """Scaling and squaring, each matrix by its own norm."""
    if a.size == 0:
        return a
    (a,) = promote_for_math(a)
    result: jax.Array = per_slice(_matrix_exp, a.ndim - 2, a)
    return result


def _matrix_exp(a: jax.Array) -> jax.Array:
    limit = _TAYLOR_18_NORM[a.real.dtype.itemsize]
    norm = jnp.max(jnp.sum(jnp.abs(a), -2), -1)[..., None, None]
    squarings = jnp.where(norm > limit, jnp.ceil(jnp.log2(norm / limit)), 0)
    # A NaN as an integer would be any number of rounds: none.
    squarings = jnp.where(jnp.isfinite(squarings), squarings, 0).astype(np.int32)
    a = a * jnp.exp2(-squarings.astype(norm.dtype))
    a2 = product(a, a)
    a3 = product(a2, a)
    identity = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    powers = (identity, a, a2, a3, product(a3, a3))
    b1, b2, b3, b4, b5 = (
        sum(c * power for c, power in zip(row, powers, strict=True) if c) for row in _TAYLOR_18
    )
    a9 = product(b1, b5) + b4
    out = b2 + product(b3 + a9, a9)

    def square(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, x = state
        return done + 1, jnp.where(done < squarings, product(x, x), x)

    most = jnp.max(squarings)
    return lax.while_loop(lambda state: state[0] < most, square, (jnp.int32(0), out))[1]


@lowers("linalg_cross")
def cross(x: jax.Array, y: jax.Array, *, dim: int = -1) -> jax.Array:
    x, y = jnp.broadcast_arrays(*promote(x, y))
    return jnp.cross(x, y, axis=dim)
