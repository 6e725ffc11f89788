"""A jaxpr in which XLA is asked for the layouts that were chosen."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import jax
from jax.extend.core import Literal, Var
from jax.sharding import NamedSharding

from xla_dtensor.layouts.choose import Choice
from xla_dtensor.layouts.graph import DimAxes
from xla_dtensor.mesh import Frame
from xla_dtensor.mesh.waypoints import waypoints


def constrained(jaxpr: Any, choice: Choice, frame: Frame) -> Any:
    """``jaxpr`` with the chosen layout asked for at each value, and what each node wants where that
    is another one. The shardings by which XLA's faults are avoided (`plans/pin.py`) go where a
    value has one now: every operand and result of an operation is told where to lie."""
    if not choice.found:
        return jaxpr
    nodes: dict[int, list[int]] = {}
    for number, node in enumerate(choice.graph.nodes):
        if node.equation is not None:
            nodes.setdefault(id(node.equation), []).append(number)
    used = {atom for equation in jaxpr.eqns for atom in equation.invars if isinstance(atom, Var)}
    used |= {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    used -= _asked_for_otherwise(jaxpr)
    made: list[Any] = []
    renamed: dict[Any, Any] = {}

    def current(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else renamed.get(atom, atom)

    def ask(variable: Any, *ways: Any) -> Any:
        for sharding in ways:
            made.append(_constraint(variable, sharding))
            (variable,) = made[-1].outvars
        return variable

    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "pin" and choice.of(equation.outvars[0]) is not None:
            renamed[equation.outvars[0]] = current(equation.invars[0])
            continue
        operands = [current(atom) for atom in equation.invars]
        if name == "sharding_constraint":  # the user's
            made.append(equation.replace(invars=operands))
            continue
        for number in nodes.get(id(equation), ()):
            for i, value in enumerate(choice.graph.nodes[number].operands):
                before = None if value is None else choice.of(value)
                wanted = choice.operand(number, i)
                if before is None or wanted is None or wanted == before:
                    continue
                way = [*waypoints(frame, before, wanted), _sharding(frame, wanted)]
                for j, atom in enumerate(equation.invars):
                    if not isinstance(atom, Literal) and choice.graph.value(atom) is value:
                        operands[j] = ask(operands[j], *way)
            if name == "cut":
                equation = _cut_anew(equation, choice, number)
        made.append(equation.replace(invars=operands))
        for result in equation.outvars:
            axes = choice.of(result) if result in used else None
            if axes is None:
                continue
            given = choice.given(nodes.get(id(equation), ()), result)
            # Without the first XLA may gather an operand in place of what is made of it.
            moves = given is not None and any({*a} - {*b} for a, b in zip(given, axes, strict=True))
            way = [given, axes] if moves else [axes]
            renamed[result] = ask(result, *(_sharding(frame, each) for each in way))
    return jaxpr.replace(eqns=made, outvars=[current(atom) for atom in jaxpr.outvars])


def _asked_for_otherwise(jaxpr: Any) -> set[Any]:
    """Sums that a redistribution asks for in an order of dims of its own (`movement/scattered.py`),
    and the numbers of which they were cast: if they lay there already, that would be too late."""
    uses = Counter(atom for e in jaxpr.eqns for atom in e.invars if isinstance(atom, Var))
    found: set[Any] = set()
    for equation in reversed(jaxpr.eqns):
        names = {"scattered"} if not found & {*equation.outvars} else {"convert_element_type"}
        if equation.primitive.name in names:
            found |= {atom for atom in equation.invars if uses[atom] == 1}
    return found


def _cut_anew(equation: Any, choice: Choice, number: int) -> Any:
    """The equation of an operation on shards, with those that were chosen; as it is, if XLA is to
    choose how some of its tensors lie."""
    node, call = choice.graph.nodes[number], equation.params["call"]
    groups = [choice.graph.group(v) for v in (*node.operands, *node.results)]
    if any(group is not None and group.is_free for group in groups):
        return equation
    places = call.tensors_among(equation.params["numbers"], equation.params["keyed"])
    tensors = [choice.operand(number, i) or () for i in places]
    results = [choice.result(number, i) or ((), ()) for i in range(len(node.results))]
    laid_out = call.laid_out(tensors, [axes for axes, _ in results], [sums for _, sums in results])
    return equation.replace(params={**equation.params, "call": laid_out})


def _sharding(frame: Frame, axes: DimAxes) -> NamedSharding:
    return frame.sharding(*(names or None for names in axes))


def _constraint(variable: Any, sharding: NamedSharding) -> Any:
    """An equation that asks for a layout."""
    new = _prototype(variable.aval, sharding)
    return new.replace(invars=[variable], outvars=[Var(variable.aval)])


@functools.lru_cache(1024)
def _prototype(aval: Any, sharding: NamedSharding) -> Any:
    ask = lambda x: jax.lax.with_sharding_constraint(x, sharding)
    closed = jax.make_jaxpr(ask)(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    (equation,) = closed.jaxpr.eqns
    return equation
