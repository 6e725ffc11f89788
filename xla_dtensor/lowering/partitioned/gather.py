"""Gathers along several dims, in the form that XLA partitions right."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def read_at(x: jax.Array, start: int, positions: Sequence[jax.Array]) -> jax.Array:
    """``x[:, ..., positions[0], positions[1], ..., :]``, the first of them along dim ``start``.

    The dims that are read at go first, and their place is given back to what was read: a gather
    whose result begins with dims that it passes on has wrong numbers
    (`base.xla_faults.PASSED_ON_FIRST`).

    Args:
        positions: integers, at least 0, of shapes that broadcast; out of range they read the
            nearest element.
    """
    dims = range(start, start + len(positions))
    first = jnp.moveaxis(x, dims, range(len(positions)))
    read = first.at[tuple(positions)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    own = jnp.broadcast_shapes(*(p.shape for p in positions))
    return jnp.moveaxis(read, range(len(own)), range(start, start + len(own)))
