"""Which values to save, if a saved byte has a price: the cheapest choice, as a minimum cut.

Every value is there in the backward pass or isn't, and every equation runs again or doesn't. A
value that is there although its equation doesn't run again is saved, which costs its bytes. An
equation that runs again costs its operations, and its operands have to be there. What costs least
is the minimum cut of a graph: nodes on the side of the sink are there, or run again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from xla_dtensor.compilation.budget.forward import Forward

WHOLE = 2**29
"""What scipy's flows, of 32 bits, are cut into: as much as to save everything costs."""

LATER = 0.05
"""By how much more it costs to run the last equation again than an equal first one. Equal layers
would otherwise all be the same, saved or not. What is saved of the last ones is freed first."""

_SOURCE, _SINK = 0, 1


class MinimumCut:
    """The graph, for one way to cut the step into pieces.

    Args:
        forward: what a backward pass reads.
        fixed: values that are saved in any case.
    """

    def __init__(self, forward: Forward, fixed: Collection[Any]) -> None:
        self._values: dict[Any, int] = {}
        self._runs: dict[int, int] = {}
        edges: set[tuple[int, int]] = set()
        needed = {v for values in forward.needed.values() for v in values} - {*fixed}
        stack = [*needed]
        self._saving: list[tuple[int, int, Any]] = []
        while stack:
            value = stack.pop()
            if value in self._values or value in fixed:
                continue
            node = self._values[value] = self._new()
            i = forward.maker[value]
            if i not in forward.made_of:
                continue  # it is saved, as it can't be made again
            known = self._runs.get(i)
            run = self._runs[i] = self._new() if known is None else known
            if forward.may_be_saved(value):
                self._saving.append((run, node, value))
            else:
                edges.add((run, node))
            if known is None:
                stack += forward.made_of[i]
        for i, run in self._runs.items():
            # Operands have to be there.
            edges.update((self._values[v], run) for v in forward.made_of[i] if v in self._values)
        edges.update((self._values[v], _SINK) for v in needed if v in self._values)
        self._edges = [*edges]
        self._sizes = [forward.size[value] for *_, value in self._saving]
        count = max(1, len(forward.equations))
        self._costs = [forward.cost(i) * (1 + LATER * i / count) for i in self._runs]
        self._total = sum(forward.size[v] for v in forward.everything())

    def _new(self) -> int:
        return 2 + len(self._values) + len(self._runs)

    def saved(self, price: float) -> frozenset[Any]:
        """The values to save, besides the fixed ones.

        Args:
            price: the operations that a saved byte is worth.
        """
        unit = WHOLE / max(1.0, price * self._total)
        starts = [run for run, *_ in self._saving] + [_SOURCE] * len(self._runs)
        ends = [node for _, node, _ in self._saving] + [*self._runs.values()]
        finite = [price * size * unit for size in self._sizes] + [c * unit for c in self._costs]
        starts += [start for start, _ in self._edges]
        ends += [end for _, end in self._edges]
        capacities = np.minimum(np.ceil(finite), WHOLE).astype(np.int32)
        capacities = np.concatenate([capacities, np.full(len(self._edges), WHOLE, np.int32)])
        nodes = self._new()
        graph = csr_array((capacities, (starts, ends)), shape=(nodes, nodes))
        left = graph - maximum_flow(graph, _SOURCE, _SINK).flow
        left.eliminate_zeros()
        reached = np.zeros(nodes, bool)
        reached[breadth_first_order(left, _SOURCE, return_predecessors=False)] = True
        return frozenset(v for run, node, v in self._saving if reached[run] and not reached[node])
