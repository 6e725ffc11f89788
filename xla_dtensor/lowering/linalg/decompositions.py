"""Orthogonal and spectral decompositions: QR, least squares, singular values, eigenvalues."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.lowering.linalg.functions import product
from xla_dtensor.lowering.linalg.systems import adjoint_of
from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.partitioned.padding import padded
from xla_dtensor.lowering.platform_primitives import in_32_bits
from xla_dtensor.lowering.registry import lowers
from xla_dtensor.lowering.workarounds import EIGENVALUES, FACTORISATIONS_IN_32_BITS


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
        q = adjoint_of(q)
    return product(q, c) if left else product(c, q)


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
        x = product(adjoint_of(vh), inverse[..., None] * product(adjoint_of(u), b))
        residuals = jnp.sum(jnp.abs(product(a, x) - b) ** 2, -2)
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
