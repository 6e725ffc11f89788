"""A step within a memory budget: its jaxpr, with what isn't saved computed again behind barriers.

What is read for that from before the pass goes through a barrier with the pass's newest value. XLA
would else merge what is computed again with the first one, and keep that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal, Var
from jax.interpreters import partial_eval

from xla_dtensor.compilation.budget.choose import choose
from xla_dtensor.compilation.budget.forward import Forward, variables_of
from xla_dtensor.compilation.budget.saving import Saving
from xla_dtensor.compilation.budget.shares import shares_of
from xla_dtensor.compilation.trace.backward_passes import spans_of


def within_budgets(
    jaxpr: Any,
    budgets: Sequence[float],
    shardings: Sequence[Any],
    cotangents: Sequence[Any] = (),
) -> Any:
    """``jaxpr`` with its backward passes within their memory budgets.

    Args:
        jaxpr: of a step, of constants.
        budgets: of its passes, in order.
        shardings: of the constants; None where nothing is known.
        cotangents: the constants that come with a backward pass that becomes a program of its own,
            which is given what this one has saved. All that it reads depends on one of them then,
            or something else would be saved, which is made of it.
    """
    if all(budget == 1 for budget in budgets):
        return jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    spans = spans_of(jaxpr.eqns)
    shares = shares_of(jaxpr, shardings)
    passes: dict[int, _Pass] = {}
    for number, span in spans.items():
        forward = Forward(jaxpr, span, [*spans.values()], shares)
        saving = choose(forward, budgets[number])
        passes.update(dict.fromkeys(span, _Pass(forward, saving, cotangents)))
    equations: list[Any] = []
    for i, equation in enumerate(jaxpr.eqns):
        if i in passes:
            equations += passes[i].with_what_it_reads(i)
        else:
            equations.append(equation)
    return jaxpr.replace(eqns=equations)


class _Pass:
    """The equations of a backward pass, with those that run again for them.

    Args:
        forward: what it reads.
        saving: what is saved of that.
        cotangents: see `within_budgets`.
    """

    def __init__(self, forward: Forward, saving: Saving, cotangents: Sequence[Any]) -> None:
        self._forward, self._saving = forward, saving
        self._late = {*cotangents}
        read = [v for i in forward.span for v in variables_of(forward.equations[i].invars)]
        before = [v for e in forward.equations[: forward.span.start] for v in e.outvars]
        # The newest value that a barrier may be tied to.
        latest = [v for v in read if v in self._late] or before[::-1]
        self._latest: Any = next(filter(_is_array, latest), None)
        self._splits = self._latest in self._late
        self._again: dict[Any, Any] = {}
        self._given: dict[Any, Any] = {}

    def with_what_it_reads(self, i: int) -> list[Any]:
        """An equation, behind what is computed again for it."""
        equation, found = self._forward.equations[i], list[Any]()
        barred: dict[Any, Any] = {}
        for j in self._saving.again.get(i, ()):
            again = self._forward.equations[j]
            operands = [self._operand(a, again, barred, found) for a in again.invars]
            results = [Var(v.aval) for v in again.outvars]
            found.append(again.replace(invars=operands, outvars=results))
            self._again.update(zip(again.outvars, results, strict=True))
        operands = [self._read(a, equation, found) for a in equation.invars]
        found.append(equation.replace(invars=operands))
        if not self._splits or not self._late.isdisjoint(variables_of(operands)):
            if self._splits:
                self._late.update(equation.outvars)
            self._latest = next(filter(_is_array, equation.outvars), self._latest)
        return found

    def _operand(self, atom: Any, of: Any, barred: dict[Any, Any], found: list[Any]) -> Any:
        """What an equation that runs again takes: what was made again, or comes from before."""
        if isinstance(atom, Literal) or not _is_array(atom):
            return self._again.get(atom, atom) if isinstance(atom, Var) else atom
        if atom in self._again and atom not in self._saving.saved:
            return self._again[atom]
        if atom not in barred:
            barred[atom] = self._barred(atom, of, found)
        return barred[atom]

    def _read(self, atom: Any, of: Any, found: list[Any]) -> Any:
        """What an equation of the pass takes."""
        if isinstance(atom, Literal):
            return atom
        if atom in self._again and atom not in self._saving.saved:
            return self._again[atom]
        if self._splits and atom in self._forward.maker and _is_array(atom):
            if atom not in self._given:
                self._given[atom] = self._barred(atom, of, found)
            return self._given[atom]
        return atom

    def _barred(self, value: Any, of: Any, found: list[Any]) -> Any:
        results = [Var(v.aval) for v in (value, self._latest)]
        barrier = _barrier().replace(
            invars=[value, self._latest], outvars=results, source_info=of.source_info
        )
        found.append(barrier)
        if self._splits:
            self._late.update(results)
        return results[0]


def _is_array(value: Any) -> bool:
    """Whether a value is there to be read, and has numbers, not keys of random ones."""
    return type(value) is Var and not jax.dtypes.issubdtype(value.aval.dtype, jax.dtypes.extended)


@functools.cache
def _barrier() -> Any:
    (equation,) = jax.make_jaxpr(jax.lax.optimization_barrier)((0.0, 0.0)).jaxpr.eqns
    return equation
