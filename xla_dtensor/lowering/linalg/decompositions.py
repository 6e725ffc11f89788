"""Matrix decompositions, linear systems and functions of matrices.

XLA does not say why a factorisation failed: where torch's `info` names the failing pivot or minor,
it is the first zero pivot for LU, and 1 for a Cholesky factor that came out as NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.partitioned.gather import read_at
from xla_dtensor.lowering.partitioned.padding import padded
from xla_dtensor.lowering.partitioned.per_slice import per_slice
from xla_dtensor.lowering.platform_primitives import in_32_bits
from xla_dtensor.lowering.promotion import promote, promote_for_math
from xla_dtensor.lowering.registry import lowers
from xla_dtensor.lowering.workarounds import EIGENVALUES, FACTORISATIONS_IN_32_BITS

# LU --------------------------------------------------------------------------------------


def _adjoint(x: jax.Array) -> jax.Array:
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


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


@lowers("linalg_lu_solve")
def lu_solve(
    lu: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint: bool = False
) -> jax.Array:
    if not left:  # X A = B, and so A^H X^H = B^H
        return _adjoint(lu_solve(lu, pivots, _adjoint(b), adjoint=not adjoint))
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
    factor = lax.linalg.cholesky(_adjoint(a) if upper else a, symmetrize_input=False)
    return _adjoint(factor) if upper else factor


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
    lower = _adjoint(a) if upper else a
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
    lower = _adjoint(factor) if upper else factor
    half = _triangular(lower, b, left_side=True, lower=True)
    options = {"transpose_a": True, "conjugate_a": True}
    return _triangular(lower, half, left_side=True, lower=True, **options)


@lowers("cholesky_inverse")
def cholesky_inverse(factor: jax.Array, upper: bool = False) -> jax.Array:
    identity = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return cholesky_solve(identity, factor, upper)


# Orthogonal and spectral decompositions ------------------------------------------------------


@lowers("linalg_qr")
def qr(a: jax.Array, mode: str = "reduced") -> tuple[jax.Array, jax.Array]:
    if mode == "r":
        return jnp.zeros(0, a.dtype), jnp.linalg.qr(a, mode="r")
    return tuple(jnp.linalg.qr(a, mode=mode))


@lowers("geqrf")
def geqrf(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    reflectors, tau = jnp.linalg.qr(a, mode="raw")
    return jnp.swapaxes(reflectors, -1, -2), tau


@meta_of("geqrf")
def _geqrf_meta(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if a.ndim < 2:
        raise RuntimeError(f"torch.geqrf: input must have at least 2 dimensions, got {a.ndim}")
    return _column_major(a, *a.shape), a.new_empty((*a.shape[:-2], min(a.shape[-2:])))


def _column_major(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty((*shape[:-2], shape[-1], shape[-2])).mT


@lowers("linalg_householder_product")
def householder_product(a: jax.Array, tau: jax.Array) -> jax.Array:
    return lax.linalg.householder_product(a, tau)


@lowers("ormqr")
def ormqr(
    a: jax.Array, tau: jax.Array, c: jax.Array, left: bool = True, transpose: bool = False
) -> jax.Array:
    """``Q C``, ``Q^H C``, ``C Q`` or ``C Q^H``, with Q the square product of the reflectors."""
    order = c.shape[-2 if left else -1]
    if 0 in c.shape or 0 in tau.shape:
        return c
    widths = [(0, 0)] * (a.ndim - 1) + [(0, order - a.shape[-1])]
    q = lax.linalg.householder_product(padded(a, widths), tau)
    if transpose:
        q = _adjoint(q)
    return _product(q, c) if left else _product(c, q)


@lowers("linalg_lstsq")
def lstsq(
    a: jax.Array, b: jax.Array, rcond: float | None = None, *, driver: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """By singular values, whatever the driver: the drivers differ in what they report, and "gels"
    takes for granted that the rank is full."""
    driver = driver or "gelsy"
    rows, columns = a.shape[-2:]
    vector = _is_vector(a.shape, b.shape)
    if vector:
        b = b[..., None]
    a_batch = a.shape[:-2]
    if rcond is None:
        rcond = float(jnp.finfo(a.dtype).eps) * max(rows, columns)
    none = jnp.zeros(0, a.real.dtype)
    batch = np.broadcast_shapes(a_batch, b.shape[:-2])
    if 0 in a.shape or 0 in b.shape:
        x = jnp.zeros((*batch, columns, b.shape[-1]), a.dtype)
        rank, values = jnp.zeros(a_batch, np.int64), jnp.zeros((*a_batch, min(rows, columns)))
        residuals = jnp.sum(jnp.abs(jnp.broadcast_to(b, (*batch, *b.shape[-2:]))) ** 2, -2)
    else:
        u, values, vh = _svd(a, False)
        kept = values > (0 if driver == "gels" else max(rcond, 0) * values[..., :1])
        rank = jnp.sum(kept, -1)
        inverse = jnp.where(kept, 1 / jnp.where(kept, values, 1), 0)
        x = _product(_adjoint(vh), inverse[..., None] * _product(_adjoint(u), b))
        residuals = jnp.sum(jnp.abs(_product(a, x) - b) ** 2, -2)
    return (
        x[..., 0] if vector else x,
        residuals if rows > columns and driver != "gelsy" else none,
        jnp.zeros(0, np.int64) if driver == "gels" else rank,
        values if driver in ("gelsd", "gelss") else none,
    )


def _is_vector(a_shape: Sequence[int], b_shape: Sequence[int]) -> bool:
    """Whether a right-hand side is one vector per matrix."""
    return len(a_shape) - 1 == len(b_shape) and tuple(a_shape[:-1]) == tuple(b_shape)


@meta_of("linalg_lstsq")
def _lstsq_meta(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, ...]:
    if a.ndim < 2:
        raise RuntimeError("torch.linalg.lstsq: input must have at least 2 dimensions.")
    if b.ndim < 1:
        raise RuntimeError("torch.linalg.lstsq: other must have at least 1 dimension.")
    if a.dtype != b.dtype:
        raise RuntimeError(
            f"torch.linalg.lstsq: Expected input and other to have the same dtype, but got input's "
            f"dtype {a.dtype} and other's dtype {b.dtype}"
        )
    driver = driver or "gelsy"
    if driver not in ("gels", "gelsy", "gelsd", "gelss"):
        raise RuntimeError(
            "torch.linalg.lstsq: parameter `driver` should be one of (gels, gelsy, gelsd, gelss)"
        )
    vector = _is_vector(a.shape, b.shape)
    rows, columns = a.shape[-2:]
    others = b.unsqueeze(-1) if vector else b
    if others.shape[-2] != rows:
        raise RuntimeError("torch.linalg.lstsq: input.size(-2) should match other.size(-2)")
    batch = torch.broadcast_shapes(a.shape[:-2], others.shape[:-2])
    real = a.abs().dtype
    x = _column_major(a, *batch, max(rows, columns), others.shape[-1])[..., :columns, :]
    residuals = a.new_empty(0, dtype=real)
    if rows > columns and driver != "gelsy":
        residuals = a.new_empty((*batch, others.shape[-1]), dtype=real)
    rank = a.new_empty(0 if driver == "gels" else a.shape[:-2], dtype=torch.int64)
    values = a.new_empty(0, dtype=real)
    if driver in ("gelsd", "gelss"):
        values = a.new_empty((*a.shape[:-2], min(rows, columns)), dtype=real)
    return x[..., 0] if vector else x, residuals, rank, values


@lowers("_linalg_svd")
def svd(
    a: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if not compute_uv:
        none = jnp.zeros(0, a.dtype)
        (values,) = _narrow(lambda a: (jnp.linalg.svd(a, compute_uv=False),), a)
        return none, values, none
    return _svd(a, full_matrices)


def _svd(a: jax.Array, full_matrices: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    u, values, vh = _narrow(lambda a: tuple(jnp.linalg.svd(a, full_matrices=full_matrices)), a)
    return u, values, vh


def _narrow(factorise: Callable[..., tuple[jax.Array, ...]], a: jax.Array) -> tuple[jax.Array, ...]:
    """``factorise(a)``, without 64-bit types where those are in the compiler's way."""
    if a.dtype not in (np.float32, np.complex64) or a.size == 0:
        return factorise(a)
    narrow = functools.partial(in_32_bits, factorise)
    found: tuple[jax.Array, ...] = FACTORISATIONS_IN_32_BITS.choose(narrow, factorise, a)
    return found


@lowers("_linalg_eigh")
def eigh(a: jax.Array, UPLO: str = "L", compute_v: bool = True) -> tuple[jax.Array, jax.Array]:
    lower = UPLO.upper() == "L"
    # As in `cholesky`: one triangle counts.
    factorise = lambda a: tuple(lax.linalg.eigh(a, lower=lower, symmetrize_input=False))
    vectors, values = _narrow(factorise, a)
    return values, vectors if compute_v else jnp.zeros(0, a.dtype)


@lowers("linalg_eig")
def eig(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _eigenvalues("aten::linalg_eig", lambda a: tuple(jnp.linalg.eig(a)), a)


@lowers("linalg_eigvals", "_linalg_eigvals")
def eigvals(a: jax.Array) -> jax.Array:
    return _eigenvalues("aten::linalg_eigvals", jnp.linalg.eigvals, a)


def _eigenvalues(name: str, factorise: Callable[..., Any], a: jax.Array) -> Any:
    text = (
        f"{name} of a matrix of shape {list(a.shape)}: XLA has eigenvalues of matrices that aren't "
        "symmetric on CPUs and GPUs only. Take torch.linalg.eigh if it is symmetric, or move it: "
        "x.full_tensor().cpu()"
    )
    return EIGENVALUES.only(text, factorise, a)


# Products and functions of matrices ----------------------------------------------------------


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
    a2 = _product(a, a)
    a3 = _product(a2, a)
    identity = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    powers = (identity, a, a2, a3, _product(a3, a3))
    b1, b2, b3, b4, b5 = (
        sum(c * power for c, power in zip(row, powers, strict=True) if c) for row in _TAYLOR_18
    )
    a9 = _product(b1, b5) + b4
    out = b2 + _product(b3 + a9, a9)

    def square(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, x = state
        return done + 1, jnp.where(done < squarings, _product(x, x), x)

    most = jnp.max(squarings)
    return lax.while_loop(lambda state: state[0] < most, square, (jnp.int32(0), out))[1]


@lowers("linalg_cross")
def cross(x: jax.Array, y: jax.Array, *, dim: int = -1) -> jax.Array:
    x, y = jnp.broadcast_arrays(*promote(x, y))
    return jnp.cross(x, y, axis=dim)
