"""Entries of tensor maps, and names of reductions and shards."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base import torch_private

# "all" is a reduction of bools, which no placement of torch's has.
REDUCTIONS = {"sum": "sum", "max": "max", "min": "min", "avg": "avg", "prod": "product"}


def StridedShard(dim: int, split_factor: int) -> Placement:
    """torch's ``_StridedShard``: the shard of a mesh dim that cuts after ones to its right."""
    return torch_private.StridedShard(dim, split_factor=split_factor)


def numbers_of(entry: Any) -> tuple[int, ...]:
    """The mesh dims of an entry of a tensor map."""
    numbers = entry if isinstance(entry, tuple | list) else (entry,)
    return tuple(number for number in numbers if number != -1)


def entry_of(numbers: tuple[int, ...]) -> Any:
    return -1 if not numbers else numbers[0] if len(numbers) == 1 else numbers


def name_of_reduction(reduce_op: str) -> str:
    return next(name for name, op in REDUCTIONS.items() if op == reduce_op)
