"""What it costs to compute an equation again, in floating-point operations of a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from xla_dtensor.layouts.parts import nbytes_of
from xla_dtensor.layouts.work import work

PER_BYTE = 10.0
"""Operations in the time that a byte of a result takes which isn't a product's. An H100 and a TPU
do 300 while a byte is read; but most of these are computed where they are used, and never read."""

PER_BYTE_MOVED = 1000.0
"""Operations in the time in which a byte comes from another device: 2000 on an H100, 1000 on a
TPU v5e."""

_REORDER = frozenset(
    {"reshape", "squeeze", "expand_dims", "transpose", "rev", "name", "optimization_barrier"}
)
LOOPS = frozenset({"scan", "while"})


def cost(equation: Any) -> float:
    """What an equation takes, if each device computes all of it."""
    inner = [*_jaxprs_in(equation)]
    if inner:
        return sum(cost(each) for jaxpr in inner for each in jaxpr.eqns)
    if equation.primitive.name in _REORDER:
        return 0.0
    return work(equation) + PER_BYTE * sum(nbytes_of(v.aval) for v in equation.outvars)


def gives_its_operand(equation: Any) -> bool:
    """Whether the result is the operand, in another order or layout."""
    return len(equation.invars) == 1 and equation.primitive.name in _REORDER


def computes(equation: Any) -> bool:
    """Whether it has products, or whatever else takes long."""
    return work(equation) > 0 or any(
        computes(each) for jaxpr in _jaxprs_in(equation) for each in jaxpr.eqns
    )


def may_run_again(equation: Any) -> bool:
    """Whether another run gives the same and does nothing else. A loop's may, but saves nothing:
    what it gives is as large when it is computed again."""
    return not equation.effects and equation.primitive.name not in LOOPS


def _jaxprs_in(equation: Any) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
