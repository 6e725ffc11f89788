"""The floating-point operations of an equation of a jaxpr, if it takes long."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from xla_dtensor.layouts.factors import shape_of


def work(equation: Any) -> float:
    """The floating-point operations of an equation that takes long; 0 of others."""
    find = _WORK.get(equation.primitive.name)
    return 0.0 if find is None else find(equation)


def _dot_work(equation: Any) -> float:
    (sums, _), _ = equation.params["dimension_numbers"]
    operand = shape_of(equation.invars[0])
    return 2.0 * math.prod(shape_of(equation.outvars[0])) * math.prod(operand[d] for d in sums)


def _convolution_work(equation: Any) -> float:
    kernel = shape_of(equation.invars[1])
    out = equation.params["dimension_numbers"].rhs_spec[0]
    return 2.0 * math.prod(shape_of(equation.outvars[0])) * math.prod(kernel) / kernel[out]


def _cut_work(equation: Any) -> float:
    """Attention's: two products over as many positions as a query has dims before its last two.
    That of others isn't known, and counts as if it were that."""
    shape = shape_of(equation.outvars[0])
    return 4.0 * math.prod(shape) * shape[-2] if len(shape) > 1 else 0.0


_WORK: dict[str, Callable[[Any], float]] = {
    "cut": _cut_work,
    "dot_general": _dot_work,
    "conv_general_dilated": _convolution_work,
}
