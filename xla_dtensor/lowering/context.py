"""`Target`: for which platform a lowering is called, and under ``shard_map`` on which shards.

Most lowerings needn't know: they are functions of whole tensors, which XLA cuts. One that is
``cut`` (`kinds.Kind.CUT`) is called with one device's shards, as its rule has them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

Axes = tuple[str, ...]


class ShardNumber(NamedTuple):
    """A shard along one dim: its index, traced where there are several, and how many there are."""

    index: Any
    of: int


WHOLE = ShardNumber(0, 1)


@dataclass(frozen=True)
class Target:
    """Where a lowering computes.

    Attributes:
        platform: JAX's name: ``"cpu"``, ``"tpu"``, ``"gpu"``.
        axes: per tensor argument, in order, the mesh axes that shard each of its dims, major first;
            empty where it gets whole tensors.
        devices: how many there are; no dim is in more shards.
    """

    platform: str
    axes: Sequence[Sequence[Axes]] = ()
    devices: int = 1

    def start(self, tensor: int, dim: int, length: int) -> Any:
        """The position at which a shard of ``length`` begins: 0, or traced.

        Args:
            tensor: which of the tensor arguments.
            dim: which of its dims, from the end or the beginning.
            length: of the shard along it.
        """
        part = self.part(tensor, dim)
        return part.index * length if part.of > 1 else 0

    def part(self, tensor: int, dim: int) -> ShardNumber:
        """Which shard it is along a dim; the arguments are those of `start`."""
        axes = self.axes[tensor][dim] if self.axes else ()
        if not axes:
            return WHOLE
        return ShardNumber(jax.lax.axis_index(axes).astype(np.int32), jax.lax.axis_size(axes))


_state = threading.local()


def here() -> Target:
    """Where the lowering computes that is being called."""
    found: Target | None = getattr(_state, "place", None)
    return Target(jax.default_backend()) if found is None else found


@contextmanager
def at(place: Target) -> Iterator[None]:
    """Lowerings that are called in this block compute there."""
    outer = getattr(_state, "place", None)
    _state.place = place
    try:
        yield
    finally:
        _state.place = outer
