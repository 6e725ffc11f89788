"""Whether this process's devices have finished all launched work."""

from __future__ import annotations

from xla_dtensor.base import events


def is_idle() -> bool:
    """Whether this process's devices have done what was asked of them."""
    import jax

    # Operations that wait to be launched have no arrays yet.
    events.settle()
    return all(array.is_deleted() or array.is_ready() for array in jax.live_arrays())
