"""The cost of changing a tensor's sharding, and the bytes that move.

A collective costs a start-up time, a hop per peer and its bytes over the link (the usual
latency-bandwidth model of a ring). The constants are those of torch's own estimate for one host,
so that a choice between two layouts falls as it does in torch; only their ratios matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.tensor import Partial, Placement

from xla_dtensor.rules.merging import REPLICATE, Placements, TensorInfo, shard_dim

STARTUP_US = 6.6
HOP_US = 0.6
BYTES_PER_US = 87.7 * 2**30 / 1e6
ALL_TO_ALL_PENALTY_US = 1.0
"""An all-to-all is charged a little over an all-gather of the same bytes."""


CUT = "cut"
"""A replicated value is cut, or taken as partial, in place."""
IMPOSSIBLE = "impossible"
"""Nothing makes a value partial that isn't."""
_ROUNDS = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}
"""How often a collective goes around the ring."""


class Collective(NamedTuple):
    """One collective.

    Attributes:
        kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute", `CUT` or
            `IMPOSSIBLE`.
        along: the mesh dim that it runs along, or the names of mesh axes.
        n: the number of devices along it.
        total: the bytes that it is about: of an all-gather what each device has afterwards, of the
            others what each device has before.
    """

    kind: str
    along: Any
    n: int
    total: float

    @property
    def nbytes(self) -> float:
        """The bytes that each device sends, and receives, in a ring."""
        if self.kind == "permute":
            return self.total
        return self.total * (_ROUNDS.get(self.kind, 0) * (self.n - 1)) / self.n

    @property
    def cost(self) -> float:
        """Microseconds."""
        if self.kind == CUT:
            return 0.0
        if self.kind == IMPOSSIBLE:
            return math.inf
        hops = _ROUNDS[self.kind] * (self.n - 1)
        cost = STARTUP_US + hops * HOP_US + self.nbytes / BYTES_PER_US
        return cost + ALL_TO_ALL_PENALTY_US if self.kind == "all-to-all" else cost


def collectives(
    info: TensorInfo, target: Placements, mesh_shape: Sequence[int]
) -> list[Collective]:
    """What brings `info` to `target`, in order. Even shards are assumed: padding isn't counted."""
    current = list(info.placements)
    if current == list(target):
        return []
    shards = math.prod(n for p, n in zip(current, mesh_shape, strict=True) if _shards(p))
    nbytes = info.nbytes / shards
    found = []
    for mesh_dim, source, goal in _steps(current, target):
        n = mesh_shape[mesh_dim]
        kind = _kind(source, goal)
        if kind == "all-gather":
            nbytes *= n
        found.append(Collective(kind, mesh_dim, n, nbytes))
        if kind == "reduce-scatter" or (kind == CUT and _shards(goal)):
            nbytes /= n
    return found


def redistribute_cost(info: TensorInfo, target: Placements, mesh_shape: Sequence[int]) -> float:
    """Microseconds to bring `info` to `target`; infinite where a value cannot be made partial."""
    total = 0.0
    for each in collectives(info, target, mesh_shape):
        total += each.cost
    return total


def moved_bytes(info: TensorInfo, target: Placements, mesh_shape: Sequence[int]) -> int:
    """The bytes that each device sends, and receives, to bring `info` to `target`.

    In a ring: of an all-gather over n devices n - 1 times what a device has, of a reduce-scatter
    or an all-to-all (n - 1) / n of it, of an all-reduce twice that; 0 where a replicated value is
    cut. Even shards are assumed: padding isn't counted.
    """
    return round(sum(each.nbytes for each in collectives(info, target, mesh_shape)))


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


def _kind(source: Placement, goal: Placement) -> str:
    """The collective that turns one placement into the other."""
    if isinstance(source, Partial):
        if isinstance(goal, Partial):
            return IMPOSSIBLE
        return "reduce-scatter" if _shards(goal) else "all-reduce"
    if _shards(source):
        if isinstance(goal, Partial):
            return IMPOSSIBLE
        return "all-to-all" if _shards(goal) else "all-gather"
    return CUT
