"""Grouped attention with query heads sharded finer than key heads: each device picks its own."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering import context

FORWARD_QUERY, BACKWARD_QUERY = 0, 1
"""Which of the tensor arguments of an attention the query is; the key comes next."""

_HEADS = -3


class GroupedHeads:
    """The key and value heads that this device's query heads see.

    Heads of queries and of keys are mostly sharded alike, and all of a device's keys are its own.
    Where there are fewer key heads than devices, or they don't divide, some mesh axes, the last,
    shard the queries' heads alone: devices along them have the same keys, and each takes its own.

    Args:
        query, key: a device's, ``[..., heads, length, size]``.
        index: `FORWARD_QUERY` or `BACKWARD_QUERY`.

    Attributes:
        own: the numbers of its heads among those that it has; None if these are all its own.
    """

    own: jax.Array | None = None

    def __init__(self, query: jax.Array, key: jax.Array, index: int) -> None:
        axes = context.here().axes
        if not axes or min(query.ndim, key.ndim) < 4:
            return
        of_query, of_key = axes[index][_HEADS], axes[index + 1][_HEADS]
        alone = of_query[len(of_key) :]
        assert of_query[: len(of_key)] == of_key, f"heads by {of_query} and {of_key}"
        if not alone or key.shape[_HEADS] == 1:
            return
        heads, self._all = query.shape[_HEADS], key.shape[_HEADS]
        group = heads * math.prod(map(jax.lax.axis_size, alone)) // self._all
        first = jax.lax.axis_index(alone).astype(np.int32) * heads
        # A head of keys per group of queries, if this device's begin and end with groups' parts.
        if group % heads == 0:
            self.own = first // group + np.zeros(1, np.int32)
        elif heads % group == 0:
            self.own = first // group + np.arange(heads // group, dtype=np.int32)
        else:
            self.own = (first + np.arange(heads, dtype=np.int32)) // group

    def take(self, keys: jax.Array) -> jax.Array:
        """Of the heads of keys, or values, that it has, its own."""
        return keys if self.own is None else jnp.take(keys, self.own, axis=_HEADS)

    def put(self, grad: jax.Array) -> jax.Array:
        """Its part of the gradient of the heads that it has, from that of its own."""
        if self.own is None:
            return grad
        shape = (*grad.shape[:_HEADS], self._all, *grad.shape[_HEADS + 1 :])
        return jnp.zeros(shape, grad.dtype).at[..., self.own, :, :].add(grad)
