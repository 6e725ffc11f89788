"""The Bunch-Kaufman factorisation of symmetric and Hermitian matrices, and solving with it.

LAPACK's `sytf2` and `hetf2` (lower triangle, partial pivoting by blocks of 1 and 2; Golub & Van
Loan, Matrix Computations, section 4.4), with its packing: D on the diagonal, the multipliers below
it, 1-based pivots, and ``-p`` twice for a block of 2.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.lowering.partitioned.per_slice import per_slice
from xla_dtensor.lowering.registry import lowers

_ALPHA = (1 + 17**0.5) / 8


def _size(x: jax.Array) -> jax.Array:
    """How LAPACK compares elements: complex ones by the sum of their parts."""
    return jnp.abs(x.real) + jnp.abs(x.imag) if x.dtype.kind == "c" else jnp.abs(x)


def _transposed(x: jax.Array, hermitian: bool) -> jax.Array:
    return jnp.conj(x.T) if hermitian else x.T


def _swap(x: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """``x`` with rows ``i`` and ``j`` exchanged."""
    rows = jnp.arange(x.shape[0])
    return x[jnp.where(rows == i, j, jnp.where(rows == j, i, rows))]


def _factor_one(a: jax.Array, hermitian: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    n = a.shape[-1]
    index = jnp.arange(n)
    lower = jnp.tril(a, -1)
    diagonal = jnp.diagonal(a)
    if hermitian:
        diagonal = diagonal.real.astype(a.dtype)
    whole = lower + _transposed(lower, hermitian) + jnp.diag(diagonal)
    zero = jnp.zeros((), whole.real.dtype)

    def body(state: Any) -> Any:
        k, a, pivots, info = state
        size = _size(a)
        column = jnp.where(index > k, size[:, k], -1)
        largest = lax.argmax(column, 0, np.int32)  # the candidate for a pivot
        column_max = jnp.maximum(column[largest], zero)
        here = size[k, k]
        row = jnp.where((index >= k) & (index != largest), size[largest], zero)
        row_max = jnp.max(row)
        singular = (jnp.maximum(here, column_max) == 0) | jnp.isnan(here)
        keep = (here >= _ALPHA * column_max) | (
            here >= _ALPHA * column_max * (column_max / jnp.where(row_max == 0, 1, row_max))
        )
        keep = keep | singular
        single = keep | (size[largest, largest] >= _ALPHA * row_max)
        with_row = jnp.where(keep, k, largest)
        step = jnp.where(single, 1, 2)
        at = k + step - 1
        # Symmetric exchange of rows and columns, of what is not factored yet.
        moved = _swap(_swap(a, at, with_row).T, at, with_row).T
        trailing = (index[:, None] >= k) & (index[None] >= k)
        a = jnp.where(trailing, moved, a)
        # The block of D, as two by two: for a single pivot the second row and column are the
        # identity's, and its multipliers are 0.
        second = jnp.minimum(k + 1, n - 1)
        pair = ~single
        below = (index >= k + step)[:, None]
        columns = jnp.stack([a[:, k], jnp.where(pair, a[:, second], 0)], axis=1)
        columns = jnp.where(below, columns, 0)
        d11 = jnp.where(singular, 1, a[k, k])
        d21 = jnp.where(pair, a[second, k], 0)
        d12 = jnp.conj(d21) if hermitian else d21
        d22 = jnp.where(pair, a[second, second], 1)
        # The multipliers: columns = multipliers @ [[d11, d12], [d21, d22]], with everything over
        # d21 first, as LAPACK does.
        scale = jnp.where(pair, d21, 1)
        e11, e12, e22 = d11 / scale, d12 / scale, d22 / scale
        determinant = jnp.where(pair, (e11 * e22 - e12) * scale, 1)
        pair_first = (columns[:, 0] * e22 - columns[:, 1]) / determinant
        pair_second = (columns[:, 1] * e11 - columns[:, 0] * e12) / determinant
        first = jnp.where(pair, pair_first, columns[:, 0] / d11)
        multipliers = jnp.stack([first, jnp.where(pair, pair_second, 0)], axis=1)
        multipliers = jnp.where(below & ~singular, multipliers, 0)
        update = multipliers @ _transposed(columns, hermitian)
        if hermitian:
            update = (update + _transposed(update, True)) / 2
        a = a - jnp.where(singular, 0, update)
        own = (index == k) | (pair & (index == second))
        kept = jnp.where(index == k, multipliers[:, :1], multipliers[:, 1:])
        a = jnp.where(below & own[None], kept, a)
        pivot = jnp.where(single, with_row + 1, -(with_row + 1))
        pivots = jnp.where(own, pivot, pivots)
        info = jnp.where((info == 0) & singular, k + 1, info)
        return k + step, a, pivots, info

    start = (jnp.zeros((), np.int64), whole, jnp.zeros(n, np.int64), jnp.zeros((), np.int64))
    _, a, pivots, info = lax.while_loop(lambda state: state[0] < n, body, start)
    return jnp.tril(a), pivots.astype(np.int32), info.astype(np.int32)


def _solve_one(ld: jax.Array, pivots: jax.Array, b: jax.Array, hermitian: bool) -> jax.Array:
    n = ld.shape[-1]
    index = jnp.arange(n)

    def forward(state: Any) -> Any:
        k, b = state
        pair = pivots[k] < 0
        step = jnp.where(pair, 2, 1)
        second = jnp.minimum(k + 1, n - 1)
        b = _swap(b, k + step - 1, jnp.abs(pivots[k]) - 1)
        below = index >= k + step
        b = b - jnp.where(below, ld[:, k], 0)[:, None] * b[k]
        b = b - jnp.where(below & pair, ld[:, second], 0)[:, None] * b[second]
        d11, d21, d22 = ld[k, k], ld[second, k], ld[second, second]
        d12 = jnp.conj(d21) if hermitian else d21
        determinant = jnp.where(pair, d11 * d22 - d12 * d21, 1)
        first = jnp.where(pair, (d22 * b[k] - d12 * b[second]) / determinant, b[k] / d11)
        other = (d11 * b[second] - d21 * b[k]) / determinant
        b = jnp.where((index == k)[:, None], first, b)
        b = jnp.where((pair & (index == second))[:, None], other, b)
        return k + step, b

    def backward(state: Any) -> Any:
        k, b = state  # the last row of the block
        pair = pivots[k] < 0
        below = (index > k)[:, None]
        rest = jnp.where(below, b, 0)
        multipliers = jnp.conj(ld) if hermitian else ld
        first = jnp.maximum(k - 1, 0)
        own = b - (index == k)[:, None] * (multipliers[:, k] @ rest)
        own = own - (pair & (index == first))[:, None] * (multipliers[:, first] @ rest)
        return k - jnp.where(pair, 2, 1), _swap(own, k, jnp.abs(pivots[k]) - 1)

    zero = jnp.zeros((), np.int64)
    _, b = lax.while_loop(lambda state: state[0] < n, forward, (zero, b))
    _, b = lax.while_loop(lambda state: state[0] >= 0, backward, (zero + n - 1, b))
    return b


@lowers("linalg_ldl_factor_ex")
def ldl_factor(
    a: jax.Array, *, hermitian: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    n = a.shape[-1]
    batch = a.shape[:-2]
    if a.size == 0:
        return a, jnp.zeros((*batch, n), np.int32), jnp.zeros(batch, np.int32)
    hermitian = hermitian and a.dtype.kind == "c"

    def factor(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        batch = a.shape[:-2]
        one = jax.vmap(functools.partial(_factor_one, hermitian=hermitian))
        ld, pivots, info = one(a.reshape(-1, n, n))
        return ld.reshape(a.shape), pivots.reshape(*batch, n), info.reshape(batch)

    result: tuple[jax.Array, jax.Array, jax.Array] = per_slice(factor, len(batch), a)
    return result


@lowers("linalg_ldl_solve")
def ldl_solve(
    ld: jax.Array, pivots: jax.Array, b: jax.Array, *, hermitian: bool = False
) -> jax.Array:
    n, batch = ld.shape[-1], np.broadcast_shapes(ld.shape[:-2], b.shape[:-2])
    shape = (*batch, n, b.shape[-1])
    if 0 in shape:
        return jnp.zeros(shape, b.dtype)
    hermitian = hermitian and ld.dtype.kind == "c"
    ld, pivots, b = (
        jnp.broadcast_to(x, (*batch, *own)).reshape(-1, *own)
        for x, own in ((ld, (n, n)), (pivots, (n,)), (b, b.shape[-2:]))
    )
    solve = jax.vmap(functools.partial(_solve_one, hermitian=hermitian))
    return solve(ld, pivots, b).reshape(shape)
