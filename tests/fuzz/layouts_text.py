"""Placements as text, as programs and scripts have them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.conformance import layouts

SCOPE = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial, "_StridedShard": _StridedShard}


def one(placement: Placement) -> str:
    if isinstance(placement, _StridedShard):
        return f"_StridedShard({placement.dim}, split_factor={placement.split_factor})"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return f"Partial({placement.reduce_op!r})" if isinstance(placement, Partial) else "Replicate()"


def text(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(map(one, placements))}]"


def parsed(placements: str) -> list[Placement]:
    found = eval(placements, dict(SCOPE))
    return list(found)


def short(placements: str) -> str:
    return layouts.short(tuple(parsed(placements)))


def drawn(rng: random.Random, shape: Sequence[int], dtype: torch.dtype, mesh: Sequence[int]) -> str:
    """Placements at random: those of the conformance tests."""
    return text(layouts.draw(rng, tuple(shape), dtype, tuple(mesh)))


def whole(leaf: Any) -> Any:
    """A program's leaf, replicated."""
    count = len(parsed(leaf.placements))
    return dataclasses.replace(leaf, placements=text([Replicate()] * count))
