"""Slices from the front of dims, hidden from XLA's partitioner where it computes them wrong."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from xla_dtensor.lowering.context import here


def cut(x: jax.Array, start: Sequence[int], stop: Sequence[int]) -> jax.Array:
    """``x[start[0]:stop[0], start[1]:stop[1], ...]``."""
    out = lax.slice(x, start, stop)
    return lax.optimization_barrier(out) if is_hidden(x.shape, start, stop) else out


def is_hidden(shape: Sequence[int], start: Sequence[int], stop: Sequence[int]) -> bool:
    """Whether shards of what is cut out may be as large as those of what it is cut out of
    (``x[:3]`` of four elements in shards of two): then the two are one to the partitioner
    (`base.xla_faults.CUT_PADDING`)."""
    devices = here().devices
    shards = [k for k in range(2, devices + 1) if devices % k == 0]
    return (
        not any(start)
        and tuple(stop) != tuple(shape)
        and all(
            count == size or any(-(-count // k) == -(-size // k) for k in shards)
            for size, count in zip(shape, stop, strict=True)
        )
    )
