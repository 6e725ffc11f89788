"""LU and Cholesky factors, linear and triangular systems, determinants.

XLA does not say why a factorisation failed: torch's `info`, which names the failing pivot or minor,
is the first zero pivot for LU, and looked for in a Cholesky factor that came out as NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.lowering.partitioned.gather import read_at
from xla_dtensor.lowering.registry import lowers


def adjoint_of(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _diagonal(x: jax.Array) -> jax.Array:
    step = jnp.arange(min(x.shape[-2:]))
    return read_at(x, x.ndim - 2, [step, step])


def _lu(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The packed factors, torch's (1-based) pivots, and info."""
    lu, pivots, _ = lax.linalg.lu(a)
    zero = _diagonal(lu) == 0
    if zero.shape[-1] == 0:
        return lu, pivots + 1, jnp.zeros(a.shape[:-2], np.int32)
    info = jnp.where(jnp.any(zero, -1), jnp.argmax(zero, -1) + 1, 0).astype(np.int32)
    return lu, pivots + 1, info


def _broadcast(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Matrices with their batch dims broadcast against each other."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return tuple(jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))


def _triangular(a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
    return lax.linalg.triangular_solve(*_broadcast(a, b), **options)


@lowers("linalg_lu_solve")
def lu_solve(
    lu: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint: bool = False
) -> jax.Array:
    if not left:  # X A = B, and so A^H X^H = B^H
        return adjoint_of(lu_solve(lu, pivots, adjoint_of(b), adjoint=not adjoint))
    lu, b = _broadcast(lu, b)
    order = lax.linalg.lu_pivots_to_permutation(pivots - 1, lu.shape[-1])
    order = jnp.broadcast_to(order, lu.shape[:-1])[..., None]
    solve = lambda x, **options: lax.linalg.triangular_solve(lu, x, left_side=True, **options)
    if adjoint:
        options = {"transpose_a": True, "conjugate_a": True}
        x = solve(solve(b, lower=False, **options), lower=True, unit_diagonal=True, **options)
        return jnp.take_along_axis(x, jnp.argsort(order, axis=-2), axis=-2)
    x = jnp.take_along_axis(b, order, axis=-2)
    return solve(solve(x, lower=True, unit_diagonal=True), lower=False)


def _lu_for_determinant(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """torch factors the transpose of contiguous real matrices here (it is free in memory), and
    the backward formulas of the determinants count on that."""
    return _lu(a if a.dtype.kind == "c" else jnp.swapaxes(a, -1, -2))


@lowers("linalg_lu_factor_ex")
def lu_factor(
    a: jax.Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if not pivot:
        raise NotImplementedError("LU without pivoting (pivot=False) does not exist in XLA")
    return _lu(a)


@lowers("lu_unpack")
def lu_unpack(
    lu: jax.Array, pivots: jax.Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, cols = lu.shape[-2:]
    k = min(rows, cols)
    none = jnp.zeros(0, lu.dtype)
    lower, upper, permutation = none, none, none
    if unpack_data:
        lower = jnp.tril(lu[..., :k], -1) + jnp.eye(rows, k, dtype=lu.dtype)
        upper = jnp.triu(lu[..., :k, :])
    if unpack_pivots:
        order = lax.linalg.lu_pivots_to_permutation(pivots - 1, rows)
        permutation = (jnp.arange(rows)[:, None] == order[..., None, :]).astype(lu.dtype)
    return permutation, lower, upper


@lowers("linalg_lu")
def linalg_lu(a: jax.Array, *, pivot: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    return lu_unpack(*lu_factor(a, pivot=pivot)[:2])


def _swaps_sign(pivots: jax.Array) -> jax.Array:
    swapped = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1), axis=-1)
    return 1 - 2 * (swapped % 2)


@lowers("_linalg_det")
def det(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    lu, pivots, _ = _lu_for_determinant(a)
    return jnp.prod(_diagonal(lu), -1) * _swaps_sign(pivots).astype(a.dtype), lu, pivots


@lowers("_linalg_slogdet")
def slogdet(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    lu, pivots, _ = _lu_for_determinant(a)
    diagonal = _diagonal(lu)
    sign = jnp.prod(jnp.sign(diagonal), -1) * _swaps_sign(pivots).astype(a.dtype)
    return sign, jnp.sum(jnp.log(jnp.abs(diagonal)), -1), lu, pivots


@lowers("_linalg_solve_ex")
def solve(
    a: jax.Array, b: jax.Array, *, left: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    lu, pivots, info = _lu(a)
    x = lu_solve(lu, pivots, b[..., None] if vector else b, left=left)
    return x[..., 0] if vector else x, lu, pivots, info


@lowers("linalg_inv_ex")
def inv(a: jax.Array, *, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    lu, pivots, info = _lu(a)
    identity = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    return lu_solve(lu, pivots, identity), info


# Triangular systems and Cholesky -----------------------------------------------------------


@lowers("linalg_solve_triangular")
def solve_triangular(
    a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    return _triangular(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@lowers("triangular_solve")
def triangular_solve(
    b: jax.Array,
    a: jax.Array,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[jax.Array, jax.Array]:
    a, b = _broadcast(a, b)
    x = lax.linalg.triangular_solve(
        a, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return x, a


@lowers("cholesky")
def cholesky(a: jax.Array, upper: bool = False) -> jax.Array:
    # Not symmetrized: torch reads one triangle alone, JAX's default would average both.
    factor = lax.linalg.cholesky(adjoint_of(a) if upper else a, symmetrize_input=False)
    return adjoint_of(factor) if upper else factor


@lowers("linalg_cholesky_ex")
def cholesky_ex(
    a: jax.Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array]:
    factor = cholesky(a, upper)
    failed = jnp.any(jnp.isnan(factor), axis=(-2, -1))
    if 0 in a.shape:
        return factor, failed.astype(np.int32)
    # XLA says only that it failed; where, is looked for if it did.
    none = jnp.zeros(a.shape[:-2], np.int32)
    lower = adjoint_of(a) if upper else a
    order = lax.cond(jnp.any(failed), _order_not_positive, lambda a: none, lower)
    return factor, jnp.where(failed, order, 0)


def _order_not_positive(a: jax.Array) -> jax.Array:
    """The order of the first leading minor of each matrix that has no factor, of matrices that have
    none themselves: by bisection, with the rest of the matrix an identity."""
    n, eye = a.shape[-1], jnp.eye(a.shape[-1], dtype=a.dtype)
    inside = jnp.maximum(*jnp.meshgrid(jnp.arange(n), jnp.arange(n)))  # in minors of a higher order

    def halve(_: Any, known: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        has, has_none = known
        middle = (has + has_none) // 2
        minor = jnp.where(inside < middle[..., None, None], a, eye)
        fails = jnp.any(jnp.isnan(lax.linalg.cholesky(minor, symmetrize_input=False)), (-2, -1))
        return jnp.where(fails, has, middle), jnp.where(fails, middle, has_none)

    start = jnp.zeros(a.shape[:-2], np.int32), jnp.full(a.shape[:-2], n, np.int32)
    return lax.fori_loop(0, n.bit_length(), halve, start)[1]


@lowers("cholesky_solve", "_cholesky_solve_helper")
def cholesky_solve(b: jax.Array, factor: jax.Array, upper: bool = False) -> jax.Array:
    lower = adjoint_of(factor) if upper else factor
    half = _triangular(lower, b, left_side=True, lower=True)
    options = {"transpose_a": True, "conjugate_a": True}
    return _triangular(lower, half, left_side=True, lower=True, **options)


@lowers("cholesky_inverse")
def cholesky_inverse(factor: jax.Array, upper: bool = False) -> jax.Array:
    identity = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return cholesky_solve(identity, factor, upper)
