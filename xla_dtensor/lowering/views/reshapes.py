"""Views that have the same elements in another shape: reshapes, permutations, expansion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering.dims import wrap_dim
from xla_dtensor.lowering.registry import lowers_view

# Reshapes ------------------------------------------------------------------------------------


def _put_reshaped(base: jax.Array, value: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    return value.astype(base.dtype).reshape(base.shape)


@lowers_view("alias", "detach", "lift_fresh", put=_put_reshaped)
def alias(base: jax.Array) -> jax.Array:
    return base


@lowers_view("view", "_reshape_alias", "_unsafe_view", put=_put_reshaped)
def view(base: jax.Array, size: Sequence[int], stride: Any = None) -> jax.Array:
    return base.reshape(_infer_size(size, base.size))


def _infer_size(size: Sequence[int], numel: int) -> list[int]:
    """``size`` with its -1 filled in (JAX refuses -1 for empty arrays)."""
    if -1 not in size:
        return list(size)
    rest = math.prod(s for s in size if s != -1)
    return [numel // max(rest, 1) if s == -1 else s for s in size]


@lowers_view("squeeze", put=_put_reshaped)
def squeeze(base: jax.Array) -> jax.Array:
    return base.reshape([s for s in base.shape if s != 1])


@lowers_view("squeeze.dim", "squeeze.dims", put=_put_reshaped)
def squeeze_dims(base: jax.Array, dim: int | Sequence[int]) -> jax.Array:
    dims = [dim] if isinstance(dim, int) else dim
    dropped = {wrap_dim(d, base.ndim) for d in dims}
    return base.reshape([s for d, s in enumerate(base.shape) if s != 1 or d not in dropped])


@lowers_view("unsqueeze", put=_put_reshaped)
def unsqueeze(base: jax.Array, dim: int) -> jax.Array:
    return jnp.expand_dims(base, dim)


# Permutations --------------------------------------------------------------------------------


def _put_permuted(base: jax.Array, value: jax.Array, dims: Sequence[int]) -> jax.Array:
    inverse = np.argsort([wrap_dim(d, base.ndim) for d in dims])
    return value.astype(base.dtype).transpose([int(d) for d in inverse])


@lowers_view("permute", put=_put_permuted)
def permute(base: jax.Array, dims: Sequence[int]) -> jax.Array:
    return base.transpose([wrap_dim(d, base.ndim) for d in dims])


def _put_transposed(base: jax.Array, value: jax.Array, dim0: int = 0, dim1: int = -1) -> jax.Array:
    return transpose(value.astype(base.dtype), dim0, dim1)


@lowers_view("transpose.int", put=_put_transposed)
def transpose(base: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return jnp.swapaxes(base, dim0, dim1) if base.ndim else base


@lowers_view("t", put=_put_transposed)
def t(base: jax.Array) -> jax.Array:
    return base.T


# Expansion -----------------------------------------------------------------------------------


def _expands(shape: Sequence[int], size: Sequence[int], implicit: bool = False) -> bool:
    return math.prod(_expanded(shape, size)) > math.prod(shape)


def _expanded(shape: Sequence[int], size: Sequence[int]) -> list[int]:
    new = len(size) - len(shape)
    return [s if s != -1 or d < new else shape[d - new] for d, s in enumerate(size)]


def _greatest_expanded(
    values: jax.Array, shape: Sequence[int], size: Sequence[int], implicit: bool = False
) -> jax.Array:
    added = values.ndim - len(shape)
    repeated = [d for d, n in enumerate(shape, added) if n == 1]
    return jnp.max(values, axis=(*range(added), *repeated)).reshape(tuple(shape))


def _put_expanded(
    base: jax.Array, value: jax.Array, size: Sequence[int], implicit: bool = False
) -> jax.Array:
    return value.astype(base.dtype).reshape(base.shape) if value.size else base


@lowers_view("expand", put=_put_expanded, repeats=_expands, greatest=_greatest_expanded)
def expand(base: jax.Array, size: Sequence[int], implicit: bool = False) -> jax.Array:
    return jnp.broadcast_to(base, _expanded(base.shape, size))
