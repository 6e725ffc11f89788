"""What a backward pass computes again when so much is saved, and how many bytes it holds then."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

from xla_dtensor.compilation.budget.forward import Forward


class Saving:
    """A choice of what is saved. The rest is made again where the pass first needs it.

    Args:
        forward: what the pass reads.
        saved: of its values, those that are saved, if they are needed.

    Attributes:
        again: by equation of the pass those that run before it, by position.
        peak: how many bytes of the values before the pass a device holds during it, at most, saved
            or computed again.
        cost: what it takes to compute them again.
    """

    def __init__(self, forward: Forward, saved: Collection[Any]) -> None:
        self._forward, self.saved = forward, saved
        self.again: dict[int, list[int]] = {}
        self.cost = 0.0
        # When a value is there, and until when, counted in equations of the pass.
        self._first: dict[Any, int] = {}
        self._last: dict[Any, int] = {}
        self._now = 0
        run: set[int] = set()
        for i in forward.span:
            missing = self._missing(forward.needed[i], run)
            for j in missing:
                self._run(forward.made_of[j], forward.equations[j].outvars)
                self.cost += forward.cost(j)
            if missing:
                self.again[i] = missing
                run.update(missing)
            self._run(forward.needed[i], ())
        self.peak = self._most()

    def _missing(self, values: list[Any], run: set[int]) -> list[int]:
        """The equations that have to run again for ``values``, in order."""
        forward, found = self._forward, set[int]()
        stack = [*values]
        while stack:
            value = stack.pop()
            i = forward.maker[value]
            if value in self.saved or i in run or i in found or i not in forward.made_of:
                continue
            found.add(i)
            stack += forward.made_of[i]
        return sorted(found)

    def _run(self, operands: list[Any], results: Any) -> None:
        forward, now = self._forward, self._now
        for value in operands:
            root = forward.root_of(value)
            self._first.setdefault(root, 0)  # else it would have been made before
            self._last[root] = now
        for value in results:
            root = forward.root_of(value)
            self._first.setdefault(root, now)
            self._last[root] = now
        self._now += 1

    def _most(self) -> float:
        change = [0.0] * (self._now + 1)
        for value, first in self._first.items():
            size = self._forward.size.get(value, 0.0)
            change[0 if value in self.saved else first] += size
            change[self._last[value] + 1] -= size
        return max(itertools.accumulate(change), default=0.0)
