"""What a backward pass reads of the computation before it, and what that is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from xla_dtensor.compilation.budget import costs
from xla_dtensor.compilation.budget.shares import LAYS_OUT
from xla_dtensor.layouts.parts import nbytes_of

CHEAP = 30
"""Of how many equations without products a value may be made that is computed again wherever it is
used: a mask, a table of positions."""


class Forward:
    """A step up to a backward pass.

    Args:
        jaxpr: the step, of constants, without what nothing needs.
        span: the pass's equations.
        spans: those of all passes.
        shares: what a device has of each value.

    Attributes:
        maker: the equation of each value that may be saved or made again, by position.
        needed: per equation of the pass its operands among them.
        made_of: of each equation that may run again the operands that need it, too.
        root: of a value that is another one in another order the other one.
        size: the bytes of each root on a device.
    """

    def __init__(
        self, jaxpr: Any, span: range, spans: Sequence[range], shares: Mapping[Any, float]
    ) -> None:
        self.equations, self.span, self._shares = jaxpr.eqns, span, shares
        passes = {i for each in spans for i in each}
        kept = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
        for i in range(span.stop, len(jaxpr.eqns)):
            if i not in passes:  # what comes later needs it all the same
                kept.update(variables_of(jaxpr.eqns[i].invars))
        makers: dict[Any, int] = {}
        self.root: dict[Any, Any] = {}
        for i in range(span.start):
            equation = jaxpr.eqns[i]
            if i in passes or not kept.isdisjoint(equation.outvars):
                continue  # there anyway
            makers.update(dict.fromkeys(equation.outvars, i))
            if self._is_its_operand(equation):
                (operand,), (result,) = equation.invars, equation.outvars
                self.root[result] = self.root.get(operand, operand)
        self.maker = makers
        self.needed = {
            i: [v for v in variables_of(jaxpr.eqns[i].invars) if v in makers] for i in span
        }
        self.made_of: dict[int, list[Any]] = {}
        stack = [v for values in self.needed.values() for v in values]
        while stack:
            i = makers[stack.pop()]
            if i not in self.made_of and costs.may_run_again(jaxpr.eqns[i]):
                self.made_of[i] = [v for v in variables_of(jaxpr.eqns[i].invars) if v in makers]
                stack += self.made_of[i]
        self.size = {
            v: nbytes_of(v.aval) * shares[v]
            for v in {self.root_of(v) for v in self._met()}
            if v in makers
        }
        self._costs: dict[int, float] = {}

    def _is_its_operand(self, equation: Any) -> bool:
        if costs.gives_its_operand(equation):
            return True
        if equation.primitive.name not in LAYS_OUT:
            return False
        (operand,), (result,) = equation.invars, equation.outvars
        return not isinstance(operand, Literal) and self._shares[operand] == self._shares[result]

    def _met(self) -> Iterator[Any]:
        for values in (*self.needed.values(), *self.made_of.values()):
            yield from values

    def root_of(self, value: Any) -> Any:
        return self.root.get(value, value)

    def may_be_saved(self, value: Any) -> bool:
        """Whether it is worth a thought: not the key of random numbers, of which the numbers would
        then be computed at any time; and in place of what is it in another order, that."""
        is_key = jax.dtypes.issubdtype(value.aval.dtype, jax.dtypes.extended)
        can = self.maker[value] in self.made_of
        return self.root_of(value) is value and not (is_key and can)

    def cost(self, i: int) -> float:
        """What it takes to run an equation again."""
        if i not in self._costs:
            equation = self.equations[i]
            share = min((self._shares[v] for v in equation.outvars), default=1.0)
            if equation.primitive.name in LAYS_OUT:
                (operand,) = equation.invars
                before = 1.0 if isinstance(operand, Literal) else self._shares[operand]
                grown = max(0.0, share - before) * nbytes_of(equation.outvars[0].aval)
                self._costs[i] = costs.PER_BYTE_MOVED * grown
            else:
                self._costs[i] = share * costs.cost(equation)
        return self._costs[i]

    def everything(self) -> set[Any]:
        """What is saved without a budget."""
        return {self.root_of(v) for values in self.needed.values() for v in values} & {*self.maker}

    # --- where it can be cut into pieces ------------------------------------------------------

    def pieces(self, most: float) -> set[Any]:
        """What is to be saved, so that the pass can compute the rest again piece by piece: what
        passes from one piece to the next. Pieces end where that is little.

        Args:
            most: how many bytes of what is needed a piece has at most, if it can be cut.
        """
        order = sorted(self.made_of)
        place = {i: p for p, i in enumerate(order)}
        last: dict[Any, int] = {}
        for p, i in enumerate(order):
            last.update((self.root_of(v), p) for v in self.made_of[i])
        cheap = self._cheap()
        crossing = [0.0] * (len(order) + 1)
        held = [0.0] * (len(order) + 1)
        spans = []
        needed = self.everything()
        for value, size in self.size.items():
            if self.maker[value] not in place:
                continue
            p = place[self.maker[value]]
            if value in needed:
                held[p + 1] += size
            if value not in cheap and last.get(value, p) > p:
                spans.append((value, p + 1, last[value]))
                crossing[p + 1] += size
                crossing[last[value] + 1] -= size
        for p in range(len(order)):
            crossing[p + 1] += crossing[p]
        cuts, begin, since = [], 0, 0.0
        for p in range(1, len(order)):
            since += held[p]
            if since > most:
                at = min(range(p, begin, -1), key=crossing.__getitem__)
                cuts.append(at)
                begin, since = at, sum(held[at + 1 : p + 1])
        return {value for value, p, q in spans if any(p <= at <= q for at in cuts)}

    def _cheap(self) -> set[Any]:
        """Values that are made of constants in a few equations without products."""
        made: dict[int, frozenset[int]] = {}
        for i in sorted(self.made_of):
            before = [self.maker[v] for v in self.made_of[i]]
            if costs.computes(self.equations[i]) or not made.keys() >= {*before}:
                continue
            whole = frozenset({i}).union(*(made[b] for b in before))
            if len(whole) <= CHEAP:
                made[i] = whole
        return {v for i in made for v in self.equations[i].outvars}


def variables_of(atoms: Sequence[Any]) -> list[Any]:
    """Each once."""
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))
