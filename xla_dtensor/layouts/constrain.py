"""Adds sharding constraints for the chosen layouts to a jaxpr."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.sharding import NamedSharding

from xla_dtensor.layouts.choice import Choice
from xla_dtensor.layouts.factors import is_elementwise
from xla_dtensor.layouts.parts import Body, DimAxes
from xla_dtensor.mesh import Frame
from xla_dtensor.mesh.intermediate import intermediate_shardings


def constrained(jaxpr: Any, choice: Choice, frame: Frame) -> Any:
    """``jaxpr`` with the chosen layouts asked for: those of values, and what each node wants where
    that is another one. What follows from those of its neighbours isn't asked for: each constraint
    costs XLA 0.15 ms, which was a fifth of what it takes for a transformer. The shardings by which
    XLA's faults are avoided (`plans/pin.py`) go where a value has one now.
    """
    if not choice.found:
        return jaxpr
    constrain = _Constrain(choice, frame)
    equations, results = constrain.all_of(jaxpr.eqns, jaxpr.outvars)
    return jaxpr.replace(eqns=equations, outvars=results)


class _Constrain:
    def __init__(self, choice: Choice, frame: Frame) -> None:
        self._choice, self._frame = choice, frame
        self._required = {
            n.operands[0]: n.required for n in choice.graph.nodes if n.equation is None
        }
        self._nodes: dict[int, list[int]] = {}
        for number, node in enumerate(choice.graph.nodes):
            if node.equation is not None:
                self._nodes.setdefault(id(node.equation), []).append(number)

    def all_of(
        self, equations: Sequence[Any], results: Sequence[Any], loop: Body | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Equations and results, with constraints; what a loop's body is given is to lie as chosen,
        too."""
        choice = self._choice
        used = {atom for e in equations for atom in e.invars if isinstance(atom, Var)}
        to_give = {a for a in results if isinstance(a, Var) and not self._is_known(a)}
        used = (used | to_give) - _asked_for_otherwise(equations)
        used -= self._follow(equations, to_give)
        made: list[Any] = []
        renamed: dict[Any, Any] = {}

        def current(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else renamed.get(atom, atom)

        def ask(variable: Any, *ways: Any, of: Any = None) -> Any:
            for sharding in ways:
                made.append(_constraint(variable, sharding, of))
                (variable,) = made[-1].outvars
            return variable

        put_off: dict[Any, list[Any]] = {}
        if loop is not None:
            numbers = self._nodes.get(id(loop.loop), ())
            behind = _behind_barriers(equations)
            for variable in loop.inputs:
                axes = choice.of(variable) if variable in used else None
                if axes is not None:
                    # What a layer has of a stack moves from where its slice lies. Else XLA may move
                    # the stack, in each layer.
                    ways = self._asked(loop.loop, numbers, variable, axes)
                    if len(ways) > 1 and variable in behind:
                        # A barrier waits for all that goes through it: weights that are gathered
                        # before it are all there before the first product begins.
                        put_off[behind[variable]], ways = ways[1:], ways[:1]
                    renamed[variable] = ask(variable, *ways)
        for equation in equations:
            name = equation.primitive.name
            if name == "pin" and choice.of(equation.outvars[0]) is not None:
                renamed[equation.outvars[0]] = current(equation.invars[0])
                continue
            operands = [current(atom) for atom in equation.invars]
            if name == "sharding_constraint":  # the user's
                before, after = choice.of(equation.invars[0]), choice.of(equation.outvars[0])
                if before is not None and after is not None:
                    way = self._way(equation.invars[0], before, after)
                    operands = [ask(*operands, *way, of=equation)]
                made.append(equation.replace(invars=operands))
                continue
            numbers = self._nodes.get(id(equation), ())
            for j, ways in self._moves(equation, numbers):
                operands[j] = ask(operands[j], *ways, of=equation)
            made.append(self._inside(equation, numbers).replace(invars=operands))
            for result in equation.outvars:
                axes = choice.of(result) if result in used and not _is_number(equation) else None
                if axes is not None:
                    ways = put_off.get(result) or self._asked(equation, numbers, result, axes)
                    renamed[result] = ask(result, *ways, of=equation)
        return made, [current(atom) for atom in results]

    def _asked(
        self, equation: Any, numbers: Sequence[int], result: Any, axes: DimAxes
    ) -> list[Any]:
        """The shardings that are asked for of a result that is to lie so, one after another."""
        given = self._choice.given(numbers, result)
        ways = [self._sharding(axes)]
        if given is None:
            return ways
        ways = [*self._way(result, given, axes), *ways]
        # Else XLA may gather an operand in place of what is made of it; and cut what an equation is
        # written out to: a running sum's many steps, or a transform along its own dim, at which XLA
        # may end the process.
        is_many = equation.primitive.name in ("prefix_scan", "transform") and given != axes
        if is_many or _communicates(given, axes):
            ways = [self._sharding(given), *ways]
        return ways

    def _follow(self, equations: Sequence[Any], to_give: set[Any]) -> set[Any]:
        """Values that need not be asked for: Shardy gives them the layouts of what they are made
        of, and nothing that is made of them, or beside them, would give them another one.

        Args:
            equations: in order.
            to_give: results whose layout nothing else says.
        """
        found: set[Any] = set()
        if sum(size > 1 for size in self._frame.sizes.values()) > LOOSE_AXES:
            return found
        of = self._choice.graph.value  # one value for a pin's result and its operand
        bound = set(map(of, to_give))
        for equation in equations:
            if self._is_plain(equation):
                found.update(equation.outvars)
            else:
                bound.update(map(of, equation.outvars))
                bound.update(of(atom) for atom in equation.invars if isinstance(atom, Var))
        return {variable for variable in found if of(variable) not in bound}

    def _is_plain(self, equation: Any) -> bool:
        """Whether Shardy finds out by itself how an equation's operands and results lie, if it is
        told of one of them: none of them moves, and each axis that cuts a result cuts an operand.
        """
        choice, numbers = self._choice, self._nodes.get(id(equation), ())
        whole = [a for a in equation.invars if isinstance(a, Var) and a.aval.shape]
        of = [*map(choice.of, (*whole, *equation.outvars))]
        if None in of or any(True for _ in self._moves(equation, numbers)):
            return False
        if is_elementwise(equation):
            return len({*of}) == 1 and bool(whole)
        if equation.primitive.name not in _PLAIN or len(numbers) != 1:
            return False
        (result,) = equation.outvars
        return choice.given(numbers, result) == of[-1] and choice.is_of_operands(*numbers)

    def _moves(self, equation: Any, numbers: Sequence[int]) -> Iterator[tuple[int, list[Any]]]:
        """Which operands an equation wants to lie elsewhere, and the way there."""
        graph = self._choice.graph
        for number in numbers:
            for i, value in enumerate(graph.nodes[number].operands):
                before = None if value is None else self._choice.of(value)
                wanted = self._choice.operand(number, i)
                if before is None or wanted is None or wanted == before:
                    continue
                for j, atom in enumerate(equation.invars):
                    if not isinstance(atom, Literal) and graph.value(atom) is value:
                        way = self._way(value, before, wanted)
                        yield j, [*way, self._sharding(wanted)]

    def _inside(self, equation: Any, numbers: Sequence[int]) -> Any:
        """The equation, with what is asked for inside of it."""
        if equation.primitive.name == "cut":
            (number,) = numbers
            call = self._choice.call(number) or equation.params["call"]
            return equation.replace(params={**equation.params, "call": call})
        body = self._choice.graph.bodies.get(id(equation))
        if body is None:
            return equation
        found, results = self.all_of(body.equations, body.results, body)
        closed = equation.params["jaxpr"]
        inner = closed.jaxpr.replace(
            constvars=[*body.constants], invars=[*body.inputs], eqns=found, outvars=results
        )
        jaxpr = ClosedJaxpr(inner, closed.consts)
        return equation.replace(params={**equation.params, "jaxpr": jaxpr})

    def _is_known(self, result: Any) -> bool:
        """Whether the program says anyway how a result lies, and that is how it was chosen."""
        value = self._choice.graph.value(result)
        return value in self._required and self._required[value] == self._choice.of(value)

    def _way(self, value: Any, before: DimAxes, after: DimAxes) -> list[NamedSharding]:
        """Where a value lies on its way from one layout to another; mostly nowhere else."""
        way = intermediate_shardings(self._frame, before, after) or self._cut_first(
            value, before, after
        )
        return way or self._turned(before, after)

    def _turned(self, before: DimAxes, after: DimAxes) -> list[NamedSharding]:
        """Where a value lies on its way if axes begin or cease to cut a dim whose other axes come
        after them: with these first, in whose parts the value is whole along the others. XLA finds
        no such way for a sum, and takes what is summed whole."""
        between: DimAxes = ()
        for old, new in zip(before, after, strict=True):
            few, many = sorted((old, new), key=len)
            is_turned = {*few} < {*many} and many[: len(few)] != few
            turned = (*few, *(axis for axis in many if axis not in few))
            between = (*between, turned if is_turned else new)
        names = [axis for dim in between for axis in dim]
        is_way = between != after and len({*names}) == len(names)
        return [self._sharding(between)] if is_way else []

    def _cut_first(self, value: Any, before: DimAxes, after: DimAxes) -> list[NamedSharding]:
        """Where a value lies on its way if some axes begin to cut it and others cease to: as much
        smaller as the first make it is what moves for the others. Likewise if some go to another
        dim and others cease to cut it. XLA may take it whole between."""
        had, has = (
            {axis: d for d, names in enumerate(axes) for axis in names} for axes in (before, after)
        )
        if not had.keys() - has.keys():
            return []
        both = zip(before, after, strict=True)
        if has.keys() - had.keys():
            between = tuple((*old, *(axis for axis in new if axis not in had)) for old, new in both)
        elif any(has.get(axis, d) != d for axis, d in had.items()):
            between = tuple((*(axis for axis in old if axis not in has), *new) for old, new in both)
        else:
            return []
        devices = [math.prod(self._frame.sizes[axis] for axis in names) for names in between]
        even = all(n % k == 0 for n, k in zip(value.aval.shape, devices, strict=True))
        return [self._sharding(between)] if even else []

    def _sharding(self, axes: DimAxes) -> NamedSharding:
        return self._frame.sharding(*(names or None for names in axes))


LOOSE_AXES = 2
"""Of a mesh with more axes each value is asked for: XLA gets what it isn't told wrong there
(`base/xla_faults.py:PRODUCTS`)."""

_PLAIN = frozenset(
    [
        "broadcast_in_dim",
        "dot_general",
        "expand_dims",
        "reduce_max",
        "reduce_min",
        "reduce_sum",
        "reshape",
        "squeeze",
        "transpose",
    ]
)
"""Primitives that Shardy takes shardings through as `factors.py` has it."""


def _is_number(equation: Any) -> bool:
    """Whether it repeats one number, which Shardy makes anew for each use, as that wants it."""
    return equation.primitive.name == "broadcast_in_dim" and not equation.invars[0].aval.shape


def _behind_barriers(equations: Sequence[Any]) -> dict[Any, Any]:
    """Of values that a barrier alone reads what they are behind it."""
    uses = Counter(atom for e in equations for atom in e.invars if isinstance(atom, Var))
    return {
        atom: result
        for e in equations
        if e.primitive.name == "optimization_barrier"
        for atom, result in zip(e.invars, e.outvars, strict=True)
        if uses[atom] == 1
    }


def _communicates(before: DimAxes, after: DimAxes) -> bool:
    """Whether devices need some of what others have."""
    return any({*a} - {*b} for a, b in zip(before, after, strict=True))


def _asked_for_otherwise(equations: Sequence[Any]) -> set[Any]:
    """Sums that a redistribution asks for in an order of dims of its own (`movement/scattered.py`),
    and the numbers of which they were cast: if they lay there already, that would be too late."""
    uses = Counter(atom for e in equations for atom in e.invars if isinstance(atom, Var))
    found: set[Any] = set()
    for equation in reversed(equations):
        names = ("convert_element_type", "pin") if found & {*equation.outvars} else ("scattered",)
        if equation.primitive.name in names:
            found |= {atom for atom in equation.invars if uses[atom] == 1}
    return found


def _constraint(variable: Any, sharding: NamedSharding, of: Any) -> Any:
    """An equation that asks for a layout, for another one, whose module and line it has then."""
    new = _prototype(variable.aval, sharding)
    own = {} if of is None else {"source_info": of.source_info}
    return new.replace(invars=[variable], outvars=[Var(variable.aval)], **own)


@functools.lru_cache(1024)
def _prototype(aval: Any, sharding: NamedSharding) -> Any:
    ask = lambda x: jax.lax.with_sharding_constraint(x, sharding)
    closed = jax.make_jaxpr(ask)(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    (equation,) = closed.jaxpr.eqns
    return equation
