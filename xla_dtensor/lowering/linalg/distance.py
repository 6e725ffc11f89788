"""Distances between rows: ``cdist`` and ``pdist``, forward and backward.

Differences of all pairs, broadcast and reduced over the features, which XLA does without storing
them.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering.promotion import promote_for_math
from xla_dtensor.lowering.registry import lowers


def _norm(difference: jax.Array, p: float) -> jax.Array:
    """The p-norm over the last dim."""
    size = jnp.abs(difference)
    if p == 0:
        return jnp.sum(size != 0, -1).astype(size.dtype)
    if p == 1:
        return jnp.sum(size, -1)
    if p == 2:
        return jnp.sqrt(jnp.sum(size * size, -1))
    if math.isinf(p):
        return jnp.max(size, -1, initial=0)
    return jnp.power(jnp.sum(jnp.power(size, p), -1), 1 / p)


def _norm_gradient(difference: jax.Array, distance: jax.Array, p: float) -> jax.Array:
    """Of `_norm` with respect to ``difference``; 0 where the distance is."""
    distance = distance[..., None]
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return jnp.sign(difference)
    size, sign = jnp.abs(difference), jnp.sign(difference)
    if math.isinf(p):
        return sign * (size == distance)
    safe = jnp.where(distance == 0, 1, distance)
    if p == 2:
        return jnp.where(distance == 0, 0, difference / safe)
    power = jnp.where(size == 0, 0, jnp.power(jnp.where(size == 0, 1, size), p - 1))
    return jnp.where(distance == 0, 0, sign * power / jnp.power(safe, p - 1))


def _by_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """The Euclidean distance from ``|x|^2 - 2 x y + |y|^2``, in one product, as torch has it."""
    squares = [jnp.sum(v * v, -1, keepdims=True) for v in (x, y)]
    left = jnp.concatenate([-2 * x, squares[0], jnp.ones_like(squares[0])], -1)
    right = jnp.concatenate([y, jnp.ones_like(squares[1]), squares[1]], -1)
    # In full precision, whatever is asked of products: of points that are near each other most
    # digits cancel.
    product = jnp.matmul(left, jnp.swapaxes(right, -1, -2), precision=jax.lax.Precision.HIGHEST)
    return jnp.sqrt(jnp.maximum(product, 0))


@lowers("_cdist_forward")
def cdist(x: jax.Array, y: jax.Array, p: float, compute_mode: int | None) -> jax.Array:
    """``compute_mode``: 1 the product always, 2 never, else for more than 25 rows."""
    x, y = promote_for_math(x, y)
    large = x.shape[-2] > 25 or y.shape[-2] > 25
    if p == 2 and (compute_mode == 1 or (compute_mode != 2 and large)):
        return _by_product(x, y)
    return _norm(x[..., :, None, :] - y[..., None, :, :], p)


@lowers("_euclidean_dist")
def euclidean_dist(x: jax.Array, y: jax.Array) -> jax.Array:
    return _by_product(*promote_for_math(x, y))


@lowers("_cdist_backward")
def cdist_backward(
    grad: jax.Array, x: jax.Array, y: jax.Array, p: float, distance: jax.Array
) -> jax.Array:
    grad, x, y, distance = promote_for_math(grad, x, y, distance)
    if distance.size == 0:
        return jnp.zeros_like(x)
    batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    difference = x[..., :, None, :] - y[..., None, :, :]
    out = jnp.sum(grad[..., None] * _norm_gradient(difference, distance, p), -2)
    return jnp.broadcast_to(out, (*batch, *x.shape[-2:]))


@lowers("_pdist_forward")
def pdist(x: jax.Array, p: float = 2.0) -> jax.Array:
    rows, columns = np.triu_indices(x.shape[0], 1)
    (x,) = promote_for_math(x)
    return _norm(x[rows] - x[columns], p)


@lowers("_pdist_backward")
def pdist_backward(grad: jax.Array, x: jax.Array, p: float, distance: jax.Array) -> jax.Array:
    grad, x, distance = promote_for_math(grad, x, distance)
    n = x.shape[0]
    if grad.size == 0:
        return jnp.zeros_like(x)
    # Every pair in both orders: where in `grad` the pair of row and column is.
    rows, columns = np.triu_indices(n, 1)
    where = np.zeros((n, n), np.int64)
    where[rows, columns] = where[columns, rows] = np.arange(len(rows))
    off_diagonal = (1 - np.eye(n)).astype(bool)
    whole = jnp.where(off_diagonal, grad[where], 0)
    distances = jnp.where(off_diagonal, distance[where], 0)
    return jnp.sum(whole[..., None] * _norm_gradient(x[:, None] - x[None], distances, p), 1)
