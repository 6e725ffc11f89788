"""Notes which operations of a trace are a backward pass's, and with which memory budget it began.

Said in the names of equations, and only where a budget is set: a program without has the names that
it would have anyway.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from xla_dtensor.base.torch_private import activation_memory_budget, current_backward

_NAME = re.compile(r"backward_pass_(\d+)")


class BackwardPasses:
    """The backward passes of a trace.

    Attributes:
        budgets: `torch._functorch.config.activation_memory_budget` when each of them began.
    """

    def __init__(self) -> None:
        self.budgets: list[float] = []

    def begins(self) -> None:
        """A backward pass begins.

        Raises:
            ValueError: the budget is none.
        """
        if current_backward() != -1:
            return  # a part of the one under way
        budget = activation_memory_budget()
        if not 0 <= budget <= 1:
            raise ValueError(
                f"torch._functorch.config.activation_memory_budget is {budget}: it goes from 0 "
                "(keep as little as can be for the backward pass) to 1 (keep everything)"
            )
        self.budgets.append(budget)

    def scope(self, inner: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        """``inner``, in which operations have the name of the pass under way, too."""
        if not self.budgets or self.budgets[-1] == 1 or current_backward() == -1:
            return inner
        return _within(f"backward_pass_{len(self.budgets) - 1}", inner)


@contextlib.contextmanager
def _within(name: str, inner: AbstractContextManager[Any]) -> Iterator[None]:
    with jax.named_scope(name), inner:
        yield


def spans_of(equations: Sequence[Any]) -> dict[int, range]:
    """Where the passes with a budget are among a trace's equations, by their number: each from its
    first operation to its last, as nothing else is traced meanwhile."""
    spans: dict[int, range] = {}
    for i, equation in enumerate(equations):
        found = _NAME.search(str(equation.source_info.name_stack))
        if found is not None:
            number = int(found[1])
            spans[number] = range(spans.get(number, range(i, i)).start, i + 1)
    return spans
