"""How products, sums and elementwise operations are cut into blocks."""

from __future__ import annotations

from typing import Any

from xla_dtensor.blocks.mapped import Cut, best, count_of


def product(equation: Any) -> Cut | None:
    """Of a ``dot_general``."""
    (left_summed, right_summed), (left_batch, right_batch) = equation.params["dimension_numbers"]
    left, right = (v.aval.shape for v in equation.invars)
    ways = []

    def add(size: int, *dims: int | None, result: int | None) -> None:
        ways.append((size, Cut(count_of(size), dims, (result,))))

    for i, (one, other) in enumerate(zip(left_batch, right_batch, strict=True)):
        add(left[one], one, other, result=i)
    place = len(left_batch)
    for dim in range(len(left)):
        if dim not in (*left_summed, *left_batch):
            add(left[dim], dim, None, result=place)
            place += 1
    for dim in range(len(right)):
        if dim not in (*right_summed, *right_batch):
            add(right[dim], None, dim, result=place)
            place += 1
    for one, other in zip(left_summed, right_summed, strict=True):
        add(left[one], one, other, result=None)
    return best(ways)


def total(equation: Any) -> Cut | None:
    """Of a ``reduce_sum``."""
    shape, summed = equation.invars[0].aval.shape, equation.params["axes"]
    ways, place = [], 0
    for dim, size in enumerate(shape):
        ways.append((size, Cut(count_of(size), (dim,), (None if dim in summed else place,))))
        place += dim not in summed
    return best(ways)


def elementwise(equation: Any) -> Cut | None:
    """Of an operation whose operands have the shape of its results."""
    shape, operands = equation.outvars[0].aval.shape, len(equation.invars)
    results = len(equation.outvars)
    cuts = [Cut(count_of(n), (dim,) * operands, (dim,) * results) for dim, n in enumerate(shape)]
    return best([*zip(shape, cuts, strict=True)])
