"""Mesh axes as a choice of layouts takes them, and the moves that it comes to (`choose.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xla_dtensor.layouts.parts import DimAxes
from xla_dtensor.layouts.prices import State

Unit = tuple[str, ...]
"""Mesh axes that shard the same dims wherever one of them does: one axis to the step."""


@dataclass(frozen=True)
class Move:
    """A collective that layouts take.

    Attributes:
        kind: of collective.
        nbytes: of its result on a device.
        axes: the mesh axes that it runs along.
        shape: of the value.
        node: the number of the node that wants or gives it.
        times: how often, in loops.
    """

    kind: str
    nbytes: float
    axes: Unit
    shape: tuple[int, ...]
    node: int
    times: int = 1


def state_of(axes: DimAxes, unit: Unit) -> State:
    """The dim that the axes of a unit shard."""
    return next((d for d, names in enumerate(axes) if unit[0] in names), None)


def units_of(sizes: Mapping[str, int], given: Sequence[DimAxes]) -> list[Unit]:
    """The axes, neighbours joined that are always together, in this order, where one of them is."""
    units: list[Unit] = []
    for axis in sizes:
        before = units[-1][-1] if units else None
        if before is not None and all(_agree(names, before, axis) for d in given for names in d):
            units[-1] = (*units[-1], axis)
        else:
            units.append((axis,))
    return units


def _agree(names: Sequence[str], first: str, second: str) -> bool:
    if first not in names and second not in names:
        return True
    return (first, second) in itertools.pairwise(names)
