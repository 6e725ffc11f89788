"""The layouts of a step's values, one mesh axis after the other (`integer_program.py`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from xla_dtensor.layouts.factors import SUM, Factor
from xla_dtensor.layouts.graph import DimAxes, Graph, Group
from xla_dtensor.layouts.integer_program import AxisChoice, State, local_bytes

ROUNDS = 2
"""How often each axis is chosen anew, with the others as they are by then."""


class Choice:
    """The layouts chosen for a jaxpr.

    Args:
        jaxpr: without inputs: those are constants.
        known: how constants lie.
        required: how results have to lie; None where that is open.
        sizes: the number of devices along each mesh axis, in the mesh's order.
    """

    def __init__(
        self,
        jaxpr: Any,
        known: Mapping[Any, DimAxes],
        required: Sequence[DimAxes | None],
        sizes: Mapping[str, int],
    ) -> None:
        self.graph = Graph(jaxpr, known, required)
        self._sizes = dict(sizes)
        given = [*known.values(), *(axes for axes in required if axes is not None)]
        self._together = {
            pair for axes in given for names in axes for pair in itertools.permutations(names, 2)
        }
        used = {axis for axes in given for names in axes for axis in names}
        self._axes: dict[Group, dict[str, State]] = {}
        self._factors: list[dict[str, Factor]] = [{} for _ in self.graph.nodes]
        for axis in [axis for axis in sizes if axis in used and sizes[axis] > 1] * ROUNDS:
            self._choose(axis)

    def of(self, variable: Any) -> DimAxes | None:
        """How a value lies; None where XLA is to choose."""
        group = self.graph.group(variable)
        if group is None or group.is_free:
            return None
        return group.known or self._dim_axes(len(group.shape), self._axes.get(group, {}))

    def operand(self, node: int, number: int) -> DimAxes | None:
        """How a node wants an operand; None where XLA is to choose."""
        variable = self.graph.nodes[node].operands[number]
        group = self.graph.group(variable)
        if group is None or group.is_free:
            return None
        states = {axis: f.operands.get(number) for axis, f in self._factors[node].items()}
        return self._dim_axes(len(group.shape), states)

    def result(self, node: int, number: int) -> tuple[DimAxes, tuple[str, ...]] | None:
        """How a node gives a result, and the axes along which devices have parts of a sum."""
        group = self.graph.group(self.graph.nodes[node].results[number])
        if group is None or group.is_free:
            return None
        states = {axis: f.results.get(number) for axis, f in self._factors[node].items()}
        sums = tuple(axis for axis, state in states.items() if state == SUM)
        return self._dim_axes(len(group.shape), states), sums

    def _choose(self, axis: str) -> None:
        def state(axes: DimAxes) -> State:
            return next((d for d, names in enumerate(axes) if axis in names), None)

        size = self._sizes[axis]
        possible: dict[Group, list[int]] = {}

        def free_dims(group: Group) -> list[int]:
            if group not in possible:
                possible[group] = [
                    d for d in range(len(group.shape)) if self._may_cut(group, d, axis)
                ]
            return possible[group]

        def own_bytes(group: Group) -> float:
            return local_bytes(group, self._others(group, axis), self._sizes)

        found = AxisChoice(self.graph, size, state, free_dims, own_bytes)
        if not found.found:
            return
        for group in self.graph.groups():
            self._axes.setdefault(group, {})[axis] = found.state(group)
        for number, factors in enumerate(self._factors):
            factors[axis] = found.factor(number)

    def _may_cut(self, group: Group, dim: int, axis: str) -> bool:
        """A dim is cut by several axes only where an input or a result is: what they would move
        besides is seldom worth it, and their order would have to be right everywhere."""
        if group.known is not None:
            return False
        others = self._others(group, axis)[dim]
        if any((axis, other) not in self._together for other in others):
            return False
        devices = self._sizes[axis] * math.prod(self._sizes[other] for other in others)
        size = group.shape[dim]
        return size >= devices if dim in group.uneven else size % devices == 0 and size > 1

    def _others(self, group: Group, axis: str) -> DimAxes:
        axes = group.known or self._dim_axes(len(group.shape), self._axes.get(group, {}))
        return tuple(tuple(name for name in names if name != axis) for names in axes)

    def _dim_axes(self, ndim: int, states: Mapping[str, State]) -> DimAxes:
        return tuple(
            tuple(axis for axis in self._sizes if states.get(axis) == d) for d in range(ndim)
        )


def choose(
    jaxpr: Any,
    known: Mapping[Any, DimAxes],
    required: Sequence[DimAxes | None],
    sizes: Mapping[str, int],
) -> Choice:
    """The layouts with which a jaxpr communicates least: see `Choice`."""
    return Choice(jaxpr, known, required, sizes)
