"""What it costs to bring a tensor from one sharding to another.

A collective costs a start-up time, a hop per peer and its bytes over the link (the usual
latency-bandwidth model of a ring). The constants are those of torch's own estimate for one host,
so that a choice between two layouts falls as it does in torch; only their ratios matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.tensor import Partial, Placement

from ._types import REPLICATE, Placements, TensorInfo, shard_dim

STARTUP_US = 6.6
HOP_US = 0.6
BYTES_PER_US = 87.7 * 2**30 / 1e6
ALL_TO_ALL_PENALTY_US = 1.0
"""An all-to-all is charged a little over an all-gather of the same bytes."""


def redistribute_cost(info: TensorInfo, target: Placements, mesh_shape: Sequence[int]) -> float:
    """Microseconds to bring `info` to `target`; infinite where a value cannot be made partial."""
    current = list(info.placements)
    if current == list(target):
        return 0.0
    shards = math.prod(n for p, n in zip(current, mesh_shape, strict=True) if _shards(p))
    nbytes = info.nbytes / shards
    total = 0.0
    for mesh_dim, source, goal in _steps(current, target):
        cost, nbytes = _step(source, goal, mesh_shape[mesh_dim], nbytes)
        total += cost
    return total


def _shards(placement: Placement) -> bool:
    return shard_dim(placement) is not None


def _steps(current: list[Placement], target: Placements) -> list[tuple[int, Placement, Placement]]:
    """The collectives, one mesh dim each.

    A shard nests inside those that earlier mesh dims make of the same tensor dim. Where that nest
    changes, the inner shard is gathered first, and remade last.
    """
    steps = []
    if len(current) > 1 and any(_shards(p) for p in current):
        for mesh_dim in reversed(range(len(current))):
            goal = target[mesh_dim]
            dim = shard_dim(goal)
            if dim is not None and any(
                (shard_dim(current[m]) == dim) != (shard_dim(target[m]) == dim)
                for m in range(mesh_dim)
            ):
                goal = REPLICATE
            if current[mesh_dim] != goal:
                steps.append((mesh_dim, current[mesh_dim], goal))
                current[mesh_dim] = goal
    for mesh_dim, goal in enumerate(target):
        if current[mesh_dim] != goal:
            steps.append((mesh_dim, current[mesh_dim], goal))
            current[mesh_dim] = goal
    return steps


def _step(source: Placement, goal: Placement, n: int, nbytes: float) -> tuple[float, float]:
    """The cost of one collective over `n` devices, and the bytes each holds after it."""

    def ring(rounds: int, moved: float) -> float:
        hops = rounds * (n - 1)
        return STARTUP_US + hops * HOP_US + moved * hops / n / BYTES_PER_US

    if isinstance(source, Partial):
        if isinstance(goal, Partial):
            return math.inf, nbytes
        if _shards(goal):
            return ring(1, nbytes), nbytes / n
        return ring(2, nbytes), nbytes
    if _shards(source):
        if isinstance(goal, Partial):
            return math.inf, nbytes
        if _shards(goal):
            return ring(1, nbytes) + ALL_TO_ALL_PENALTY_US, nbytes
        return ring(1, nbytes * n), nbytes * n
    # A replicated value is cut, or taken as partial, in place.
    return 0.0, (nbytes / n if _shards(goal) else nbytes)
