"""Which values are in a device's memory at the same time, and their bytes by chosen layouts.

A value is alive from the equation that makes it to the last that takes it. Inputs are alive all
along; results take an input's place, or come when most else is gone. What an operation needs while
it runs isn't known here, nor what XLA doesn't store since it computes it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Literal

from xla_dtensor.layouts.graph import Graph
from xla_dtensor.layouts.parts import Group, nbytes_of

TAKEN_FOR_ALIVE = 1.3
"""How many bytes XLA takes at least for each byte that is made and alive: 1.3 to 1.7 in the steps
of `benchmarks/layout_sweep.py`, along sequences up to 2.4 (2026-11-26, XLA's CPU compiler)."""

PER_BYTE_TOO_MANY = 100.0
"""What a byte more than there may be costs, in bytes that are moved."""

Point = tuple[float, Mapping[Group, float]]
"""How many bytes there may be, at a point of a program, of the values that are alive there and of
which the layouts are chosen here; and how many of each group there are, whole."""


class Alive:
    """What is alive in a program.

    Args:
        jaxpr: without inputs: those are constants.
        graph: of it.
    """

    def __init__(self, jaxpr: Any, graph: Graph) -> None:
        self._graph, self._count = graph, len(jaxpr.eqns) + 1
        first = {graph.value(v): 0 for v in jaxpr.constvars}
        last = dict.fromkeys(first, self._count - 1)
        for i, equation in enumerate(jaxpr.eqns):
            taken = [atom for atom in equation.invars if not isinstance(atom, Literal)]
            last.update((graph.value(v), i) for v in taken if first.get(graph.value(v)) != 0)
            if any(v.aval.shape for v in taken):  # else it is made of scalars at its use
                for result in equation.outvars:
                    first.setdefault(graph.value(result), i + 1)
        spans = [(v, i, last[v]) for v, i in first.items() if v in last]
        self._spans = [span for span in spans if not _is_on_host(span[0])]
        self._on_host = [span for span in spans if _is_on_host(span[0])]

    def most(self, share: Callable[[Group], float]) -> tuple[float, dict[Group, float]]:
        """The bytes that a device has where it has most, and how many of each group, whole, are
        alive there.

        Args:
            share: what a device has of a group.
        """
        change = [0.0] * (self._count + 1)
        for value, first, last in self._spans:
            nbytes, group = self._bytes(value, first), self._group(value)
            nbytes *= 1.0 if group is None else share(group)
            change[first] += nbytes
            change[last + 1] -= nbytes
        alive = [*itertools.accumulate(change)]
        point = max(range(len(alive)), key=alive.__getitem__)
        groups: dict[Group, float] = {}
        for value, first, last in self._spans:
            group = self._group(value)
            if group is not None and first <= point <= last:
                groups[group] = groups.get(group, 0.0) + self._bytes(value, first)
        return alive[point], groups

    def on_host(self, share: Callable[[Group], float]) -> float:
        """The bytes that a device has in its host's memory meanwhile, of what the program itself
        makes.

        Args:
            share: what a device has of a group.
        """
        made = ((value, self._group(value)) for value, first, _ in self._on_host if first)
        return sum(nbytes_of(v.aval) * (1.0 if g is None else share(g)) for v, g in made)

    def _group(self, value: Any) -> Group | None:
        group = self._graph.group(value)
        return None if group is None or group.is_free else group

    def _bytes(self, value: Any, first: int) -> float:
        return nbytes_of(value.aval) * (TAKEN_FOR_ALIVE if first else 1.0)


def _is_on_host(value: Any) -> bool:
    return getattr(value.aval, "memory_space", None) == jax.memory.Space.Host
