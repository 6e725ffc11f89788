"""``embedding_bag``: rows of a table, summed, averaged or maximized per bag of indices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.partitioned.cut import cut
from xla_dtensor.lowering.partitioned.scatter import narrow, write
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers

SUM, MEAN, MAX = 0, 1, 2  # torch's EmbeddingBagMode
_Bags = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


# torch's own says what the CPU's fast paths leave out; the backward needs all of it.
@meta_of("_embedding_bag", "_embedding_bag_forward_only")
def _(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[torch.Tensor, ...]:
    if per_sample_weights is not None and mode != SUM:
        raise RuntimeError("embedding_bag: per_sample_weights only supported with mode='sum'")
    bags = offsets.shape[0] - include_last_offset
    if bags < 0:
        raise RuntimeError("include_last_offset: numBags should be at least 1")
    return (
        weight.new_empty(bags, weight.shape[1]),
        indices.new_empty(indices.shape[0]),
        indices.new_empty(bags),
        indices.new_empty((bags, weight.shape[1]) if mode == MAX else 0),
    )


def _valid(indices: jax.Array, padding_idx: int) -> jax.Array:
    return indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, bool)


@lowers("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> _Bags:
    """The bags, and per index its bag, per bag its size, and the rows where maxima were found."""
    count, bags = indices.shape[0], offsets.shape[0] - include_last_offset
    wide, columns = math_dtype(weight.dtype), weight.shape[1]
    if not count or not bags:
        where = jnp.full((bags, columns) if mode == MAX else 0, -1, np.int64)
        sizes = jnp.zeros(bags, np.int64)
        return jnp.zeros((bags, columns), wide), jnp.zeros(count, np.int64), sizes, where
    begins = narrow(cut(offsets, [0], [bags]), count)
    begun = write(jnp.zeros(count, np.int32), (begins,), "add", jnp.ones(bags, np.int32))
    bag = jnp.cumsum(begun) - 1
    valid = _valid(indices, padding_idx)
    if include_last_offset:  # what comes after it is in no bag
        bag = jnp.where(jnp.arange(count) < offsets[-1], bag, bags)
    sizes = write(jnp.zeros(bags, np.int32), (bag,), "add", valid.astype(np.int32))
    rows = weight.at[narrow(indices, weight.shape[0])].get(mode="clip").astype(wide)
    if mode == MAX:
        out, where = _largest(rows, indices, bag, sizes, valid)
        return out, bag, sizes, where
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.astype(wide)[:, None]
    rows = jnp.where(valid[:, None], rows, 0)
    out = write(jnp.zeros((bags, columns), wide), (bag,), "add", rows)
    if mode == MEAN:
        out = out / jnp.maximum(sizes, 1).astype(wide)[:, None]
    return out, bag, sizes, jnp.zeros(0, np.int64)


def _largest(
    rows: jax.Array, indices: jax.Array, bag: jax.Array, sizes: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Per bag and column the maximum (0 of an empty bag), and the index of its row (-1)."""
    shape = (sizes.shape[0], rows.shape[1])
    rows = jnp.where(valid[:, None], rows, -jnp.inf)
    best = write(jnp.full(shape, -jnp.inf, rows.dtype), (bag,), "max", rows)
    count = rows.shape[0]
    # The first of equal ones.
    order = jnp.arange(count, dtype=np.int32)[:, None]
    order = jnp.where(
        (rows == jnp.take(best, bag, axis=0, mode="clip")) & valid[:, None], order, count
    )
    first = write(jnp.full(shape, count, np.int32), (bag,), "min", order)
    where = jnp.take(indices, jnp.minimum(first, count - 1), mode="clip")
    empty = (sizes == 0)[:, None]
    return jnp.where(empty, 0, best), jnp.where(empty, -1, where)


@lowers("_embedding_bag_dense_backward")
def embedding_bag_backward(
    grad: jax.Array,
    indices: jax.Array,
    offset2bag: jax.Array,
    bag_size: jax.Array,
    maximum_indices: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: jax.Array | None,
    padding_idx: int = -1,
) -> jax.Array:
    grad = grad.astype(math_dtype(grad.dtype))
    zeros = jnp.zeros((num_weights, grad.shape[1]), grad.dtype)
    if not indices.size or not grad.size:
        return zeros
    if mode == MAX:
        rows = jnp.where((bag_size == 0)[:, None], num_weights, maximum_indices)
        columns = jnp.arange(grad.shape[1], dtype=np.int32)[None]
        return write(zeros, (rows, columns), "add", grad)
    rows = grad.at[offset2bag].get(mode="fill", fill_value=0)
    if mode == MEAN:
        rows = (
            rows
            / jnp.maximum(jnp.take(bag_size, offset2bag, mode="clip"), 1).astype(grad.dtype)[
                :, None
            ]
        )
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.astype(grad.dtype)[:, None]
    indices = narrow(indices, num_weights)
    if scale_grad_by_freq:
        ones = jnp.ones(indices.shape, grad.dtype)
        count = write(jnp.zeros(num_weights, grad.dtype), (indices,), "add", ones)
        rows = rows / count[indices][:, None]
    target = jnp.where(_valid(indices, padding_idx), indices, num_weights)
    return write(zeros, (target,), "add", rows)


@lowers("_embedding_bag_backward")
def embedding_bag_any_backward(
    grad: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    offset2bag: jax.Array,
    bag_size: jax.Array,
    maximum_indices: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    *weights_and_padding: Any,
) -> jax.Array:
    if sparse:
        raise UnsupportedOpError(
            "embedding_bag with sparse=True: XLA has no sparse tensors; leave it out"
        )
    bags = indices, offset2bag, bag_size, maximum_indices, num_weights
    return embedding_bag_backward(grad, *bags, scale_grad_by_freq, mode, *weights_and_padding)


@lowers("_embedding_bag_per_sample_weights_backward")
def per_sample_weights_backward(
    grad: jax.Array,
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    offset2bag: jax.Array,
    mode: int,
    padding_idx: int = -1,
) -> jax.Array:
    wide = math_dtype(grad.dtype)
    if not indices.size or not grad.size:
        return jnp.zeros(indices.shape, wide)
    rows = weight.at[narrow(indices, weight.shape[0])].get(mode="clip").astype(wide)
    of_bag = grad.astype(wide).at[offset2bag].get(mode="fill", fill_value=0)
    along = jnp.sum(rows * of_bag, axis=1)
    return jnp.where(_valid(indices, padding_idx), along, 0)


@lowers("embedding_renorm")
def embedding_renorm(
    weight: jax.Array, indices: jax.Array, max_norm: float, norm_type: float
) -> jax.Array:
    """Rows that ``indices`` name are made shorter, if their norm is greater than ``max_norm``."""
    wide = weight.astype(math_dtype(weight.dtype))
    rows = narrow(indices.reshape(-1), weight.shape[0])
    named = write(jnp.zeros(weight.shape[0], bool), (rows,), "set", jnp.ones(rows.shape, bool))
    norm = jnp.linalg.norm(wide, norm_type, axis=1)
    scale = jnp.where(named & (norm > max_norm), max_norm / (norm + 1e-7), 1.0)
    return wide * scale[:, None].astype(wide.dtype)
