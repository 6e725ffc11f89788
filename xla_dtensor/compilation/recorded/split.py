"""Splits a jaxpr into a forward and a backward part, and finds what is saved between them."""

from __future__ import annotations

from typing import Any

from jax.extend import core as jax_core

from xla_dtensor.compilation.trace.step_trace import READ


def reordered(jaxpr: Any, outputs: list[int]) -> Any:
    """A jaxpr whose outputs are those of ``jaxpr`` at these positions."""
    debug = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    return jaxpr.replace(outvars=[jaxpr.outvars[i] for i in outputs], debug_info=debug)


class SplitJaxpr:
    """A jaxpr in two parts.

    Attributes:
        forward: what doesn't depend on the cotangents: its results, then the residuals.
        residuals: how many those are.
        backward: takes the residuals, the constants in ``constants``, the cotangents.
        constants: which constants of the whole the second part needs, by position.
        reads, reads_constants: the marks (`StepTrace.reads`), and the constants, whose values the
            gradients depend on; each with the cotangents by way of which.
    """

    def __init__(
        self, jaxpr: Any, cotangents: list[int | None], gradients: list[int], outputs: list[int]
    ) -> None:
        """Args:
        cotangents: which constants stand for the cotangents; None for one that nothing uses.
        gradients, outputs: which outputs are those of the second and first part.
        """
        stand_ins = {jaxpr.constvars[c]: i for i, c in enumerate(cotangents) if c is not None}
        self._find_reads(jaxpr, stand_ins, [jaxpr.outvars[i] for i in gradients])
        jaxpr = _without_marks(jaxpr)
        late = set(stand_ins)
        first, second = [], []
        for equation in jaxpr.eqns:
            if any(not _is_literal(v) and v in late for v in equation.invars):
                late.update(equation.outvars)
                second.append(equation)
            else:
                first.append(equation)
        outvars = [jaxpr.outvars[i] for i in gradients]
        second = [*_moves(jaxpr.constvars, first, [*second, outvars]), *second]
        made = {v for e in second for v in e.outvars}
        early = {v for e in first for v in e.outvars} - made
        needed: dict[Any, None] = {}
        for equation in second:
            needed.update((v, None) for v in equation.invars if not _is_literal(v))
        needed.update((v, None) for v in outvars if not _is_literal(v))
        residuals = [v for v in needed if v in early]
        position = {v: i for i, v in enumerate(jaxpr.constvars)}
        self.constants = [position[v] for v in needed if v in position and v not in late]
        self.residuals = len(residuals)
        debug = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        kept = [jaxpr.outvars[i] for i in outputs]
        self.forward = jaxpr.replace(
            eqns=_alive(first, [*kept, *residuals]), outvars=[*kept, *residuals], debug_info=debug
        )
        self.backward = jaxpr.replace(
            constvars=[],
            invars=[
                *residuals,
                *(jaxpr.constvars[i] for i in self.constants),
                *(jaxpr.constvars[i] for i in cotangents if i is not None),
            ],
            eqns=second,
            outvars=outvars,
            debug_info=debug,
        )

    def _find_reads(self, jaxpr: Any, stand_ins: dict[Any, int], gradients: list[Any]) -> None:
        """Where values meet cotangents on the way to ``gradients``."""
        marks: dict[Any, set[int]] = {}
        through: dict[Any, set[int]] = {v: {i} for v, i in stand_ins.items()}
        position = {v: i for i, v in enumerate(jaxpr.constvars)}
        self.reads: dict[int, set[int]] = {}
        self.reads_constants: dict[int, set[int]] = {}

        def met(variable: Any, cotangents: set[int]) -> None:
            for mark in marks.get(variable, ()):
                self.reads.setdefault(mark, set()).update(cotangents)
            if variable in position and variable not in through:
                self.reads_constants.setdefault(position[variable], set()).update(cotangents)

        for equation in _alive(jaxpr.eqns, gradients):
            inputs = [v for v in equation.invars if not _is_literal(v)]
            cotangents = set().union(*(through.get(v, ()) for v in inputs))
            if cotangents:
                for variable in inputs:
                    met(variable, cotangents)
                through.update((v, cotangents) for v in equation.outvars)
                continue
            mark = _mark_of(equation)
            found = set().union(*(marks.get(v, ()) for v in inputs))
            found |= set() if mark is None else {mark}
            if found:
                marks.update((v, found) for v in equation.outvars)
        for variable in gradients:
            if not _is_literal(variable):
                met(variable, through.get(variable, set(stand_ins.values())))


# Primitives that only reorder or repeat elements: cheaper to run again than to save.
_MOVES = frozenset(
    {
        "transpose",
        "reshape",
        "broadcast_in_dim",
        "squeeze",
        "expand_dims",
        "sharding_constraint",
        "pin",
    }
)


def _moves(constants: list[Any], equations: list[Any], users: list[Any]) -> list[Any]:
    """The equations that give ``users`` transposed parameters and the like: done again in the
    second part, or each call would keep a copy of all parameters for its backward pass.

    Args:
        constants: the variables that are there anyway.
        users: equations, or lists of variables.
    """
    there, movable = set(constants), dict[Any, Any]()
    for equation in equations:
        inputs = [v for v in equation.invars if not _is_literal(v)]
        if equation.primitive.name in _MOVES and there.issuperset(inputs):
            there.update(equation.outvars)
            movable.update((v, equation) for v in equation.outvars)
    needed: set[int] = set()
    stack = [v for user in users for v in getattr(user, "invars", user)]
    while stack:
        variable = stack.pop()
        equation = None if _is_literal(variable) else movable.get(variable)
        if equation is not None and id(equation) not in needed:
            needed.add(id(equation))
            stack += equation.invars
    return [equation for equation in equations if id(equation) in needed]


def _mark_of(equation: Any) -> int | None:
    """The number of the mark that an equation is, or None."""
    name = equation.params.get("name")
    if equation.primitive.name == "name" and name.startswith(READ):
        return int(name.removeprefix(READ))
    return None


def _without_marks(jaxpr: Any) -> Any:
    """The same with the values in place of their marks."""
    values: dict[Any, Any] = {}

    def value(variable: Any) -> Any:
        return variable if _is_literal(variable) else values.get(variable, variable)

    kept = []
    for equation in jaxpr.eqns:
        invars = list(map(value, equation.invars))
        if _mark_of(equation) is None:
            kept.append(equation.replace(invars=invars))
        else:
            values[equation.outvars[0]] = invars[0]
    return jaxpr.replace(eqns=kept, outvars=list(map(value, jaxpr.outvars)))


def _is_literal(variable: Any) -> bool:
    return isinstance(variable, jax_core.Literal)


def _alive(equations: list[Any], outputs: list[Any]) -> list[Any]:
    """The equations that something needs."""
    needed = {v for v in outputs if not _is_literal(v)}
    kept = []
    for equation in reversed(equations):
        if equation.effects or any(v in needed for v in equation.outvars):
            needed.update(v for v in equation.invars if not _is_literal(v))
            kept.append(equation)
    return kept[::-1]
