"""`Constants`: what a trace computes of what is known on the host, outside of the trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xla_dtensor.execution.interfaces import Plan
from xla_dtensor.forms.read import base_recipe, computing_constants


class Constants:
    """The results of an operation on constants of the step, and what it writes: computed outside of
    the trace, when one is asked for, and once, as a mask is asked for by each layer.

    Args:
        recipes: of each leaf.
        bases: of each write the recipe of what is there, and the positions of the view's steps.

    Attributes:
        state: of what the step finds on the devices the values that are among the operands
            (`compilation.trace.state_values`): with others the results are computed anew.
    """

    def __init__(
        self, plan: Plan, recipes: list[Any], bases: list[tuple[Any, tuple[int, ...]]]
    ) -> None:
        self._plan, self._recipes, self._bases = plan, recipes, bases
        self._arrays: Any = None
        self._versions: list[int] = []
        given = (*recipes, *(recipe for recipe, _ in bases))
        self.state = tuple(dict.fromkeys(value for r in given for value in state_of(r)))

    def array(self, position: int) -> Any:
        # Those that this is made of come first, and not each in a call of the next one's: a loop
        # that fills a table has thousands.
        waiting = [self]
        while waiting:
            first = [one for one in waiting[-1]._made_of() if not one._is_computed()]
            if first:
                waiting += first
            else:
                waiting.pop()._compute()
        return self._arrays[position]

    def _made_of(self) -> list[Constants]:
        recipes = (*self._recipes, *(recipe for recipe, _ in self._bases))
        return [owner for owner in map(_owner, recipes) if isinstance(owner, Constants)]

    def _is_computed(self) -> bool:
        return self._arrays is not None and self._versions == versions_of(self.state)

    def _compute(self) -> None:
        if self._is_computed():
            return
        versions = versions_of(self.state)
        with computing_constants():
            bases = [(recipe(), positions) for recipe, positions in self._bases]
            arrays = self._plan.run.of_values([r() for r in self._recipes], bases)
        # In this order, and last: an interrupt in between mustn't leave old values as new ones.
        self._arrays = arrays
        self._versions = versions
        if not self.state:
            self._recipes, self._bases = [], []  # with the constants that these are made of


def state_of(recipe: Any) -> tuple[Any, ...]:
    """The values of what the step finds on the devices that a recipe computes with."""
    found: tuple[Any, ...] = getattr(_owner(recipe), "state", ())
    return found


def versions_of(state: Iterable[Any]) -> list[int]:
    return [value.version() for value in state]


def _owner(recipe: Any) -> Any:
    return getattr(base_recipe(recipe).func, "__self__", None)
