"""A jaxpr in which XLA is asked for the layouts that were chosen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.layouts.choose import Choice
from xla_dtensor.layouts.graph import DimAxes
from xla_dtensor.mesh import Frame
from xla_dtensor.mesh.waypoints import waypoints


def constrained(jaxpr: Any, choice: Choice, frame: Frame) -> Any:
    """``jaxpr`` with the chosen layout asked for at each value, and what each node wants where that
    is another one. The shardings by which XLA's faults were to be avoided (`plans/pin.py`) are
    gone: every operand and result has one now."""
    nodes: dict[int, list[int]] = {}
    for number, node in enumerate(choice.graph.nodes):
        if node.equation is not None:
            nodes.setdefault(id(node.equation), []).append(number)
    made: list[Any] = []
    renamed: dict[Any, Any] = {}

    def current(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else renamed.get(atom, atom)

    def ask(variable: Any, axes: DimAxes) -> Any:
        new = _constraint(variable, axes, frame)
        made.append(new)
        return new.outvars[0]

    for equation in jaxpr.eqns:
        if equation.primitive.name == "pin":
            renamed[equation.outvars[0]] = current(equation.invars[0])
            continue
        operands = [current(atom) for atom in equation.invars]
        for number in nodes.get(id(equation), ()):
            node = choice.graph.nodes[number]
            if node.equation.primitive.name == "sharding_constraint":
                continue
            for i, value in enumerate(node.operands):
                wanted = None if value is None else choice.operand(number, i)
                if wanted is None or wanted == choice.of(value):
                    continue
                for j, atom in enumerate(equation.invars):
                    if not isinstance(atom, Literal) and choice.graph.value(atom) is value:
                        operands[j] = ask(operands[j], wanted)
        (number,) = nodes.get(id(equation), ()) if equation.primitive.name == "cut" else (None,)
        if number is not None:
            equation = _cut_anew(equation, choice, number)
        made.append(equation.replace(invars=operands))
        if equation.primitive.name == "sharding_constraint":
            continue
        for result in equation.outvars:
            axes = choice.of(result)
            if axes is not None and len(axes) > 1:
                renamed[result] = ask(result, axes)
    outvars = [current(atom) for atom in jaxpr.outvars]
    return jaxpr.replace(eqns=made, outvars=outvars)


def _cut_anew(equation: Any, choice: Choice, number: int) -> Any:
    """The equation of an operation on shards, with those that were chosen."""
    node, call = choice.graph.nodes[number], equation.params["call"]
    keyed = equation.params["keyed"]
    tensors = [choice.operand(number, i) or () for i in range(keyed, len(node.operands))]
    results = [choice.result(number, i) or ((), ()) for i in range(len(node.results))]
    laid_out = call.laid_out(tensors, [axes for axes, _ in results], [sums for _, sums in results])
    return equation.replace(params={**equation.params, "call": laid_out})


def _constraint(variable: Any, axes: DimAxes, frame: Frame) -> Any:
    """An equation that asks for a layout."""
    one = _prototype(variable.aval, axes, frame)
    return one.replace(invars=[variable], outvars=[Var(variable.aval)])


@functools.lru_cache(1024)
def _prototype(aval: Any, axes: DimAxes, frame: Frame) -> Any:
    sharding = frame.sharding(*(names or None for names in axes))
    closed = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(
        jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    )
    (equation,) = closed.jaxpr.eqns
    return equation
