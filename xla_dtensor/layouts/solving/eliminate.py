"""Variable elimination: minimises a sum of functions of one or two variables each, if it can.

A variable that has a function with no more than two others can go: for each pair of their values
its own best value is known, and what that costs is a function of these two. So a chain of any
length becomes one function of its ends, and a tree a number (Bertelè and Brioschi, Nonserial
Dynamic Programming, 1972). Variables that are left have more neighbours, and are for somebody else
to solve.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

V = TypeVar("V", bound=Hashable)
Costs = NDArray[np.float64]


class Sum(Generic[V]):
    """A sum of functions of variables, each of which has a few values, counted from 0.

    Attributes:
        own: of each variable that is left, what its values cost by themselves.
    """

    def __init__(self) -> None:
        self.own: dict[V, Costs] = {}
        self._with: dict[V, dict[V, Costs]] = {}
        self._gone: list[tuple[V, list[V], NDArray[np.intp]]] = []

    def variable(self, variable: V, costs: Sequence[float]) -> None:
        """Add a variable, whose values cost so much by themselves."""
        self.own[variable] = np.array(costs, float)
        self._with[variable] = {}

    def add(self, variables: Sequence[V], costs: Costs) -> None:
        """Add a function of at most two variables; ``costs`` has an axis for each."""
        if len(variables) == 1:
            self.own[variables[0]] = self.own[variables[0]] + costs
        elif variables:
            one, two = variables
            self._with[one][two] = self._with[one].get(two, 0.0) + costs
            self._with[two][one] = self._with[two].get(one, 0.0) + costs.T

    def pairs(self) -> Iterator[tuple[V, V, Costs]]:
        """The functions of two variables that are left."""
        seen = set()
        for one, others in self._with.items():
            seen.add(one)
            for two, costs in others.items():
                if two not in seen:
                    yield one, two, costs

    def eliminate(self, kept: Collection[V]) -> None:
        """Let each variable go that can, but those that are ``kept``."""
        todo = [*self.own]
        while todo:
            variable = todo.pop()
            neighbours = [*self._with.get(variable, ())]
            if variable in kept or variable not in self.own or len(neighbours) > 2:
                continue
            total = self.own.pop(variable)
            for i, other in enumerate(neighbours):
                costs = self._with[other].pop(variable)
                axes = [len(costs) if i == j else 1 for j in range(len(neighbours))]
                total = total + costs.reshape(*axes, -1)
            del self._with[variable]
            self._gone.append((variable, neighbours, total.argmin(-1)))
            self.add(neighbours, total.min(-1))
            todo += neighbours

    def complete(self, values: dict[V, int]) -> None:
        """Add the best values of those that are gone to the values of those that are left."""
        for variable, neighbours, best in reversed(self._gone):
            values[variable] = int(best[tuple(values[other] for other in neighbours)])
