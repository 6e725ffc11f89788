"""A program that HiGHS doesn't solve with the work that it is given here: prints what it took.

python -m tests.layouts.solving.hard_program WORK
"""

from __future__ import annotations

import sys

import numpy as np

from xla_dtensor.layouts.solving import highs
from xla_dtensor.layouts.solving.highs import IntegerProgram

ITEMS = 40


def program() -> IntegerProgram:
    """Items of about the price that they weigh, on five scales: half of each has to go."""
    generator = np.random.default_rng(0)
    weights = generator.integers(100, 1000, (5, ITEMS)).astype(float)
    costs = weights.mean(0) + generator.integers(0, 100, ITEMS)
    found = IntegerProgram()
    pairs = [[found.variable(c, whole=True) for c in (0.0, cost)] for cost in costs]
    for pair in pairs:
        found.one_of(pair)
    for scale in weights:
        kept = {pair[0]: w for pair, w in zip(pairs, scale, strict=True)}
        found.at_most(kept, scale.sum() / 2)
    return found


def solved() -> tuple[str, float]:
    """Which items were kept, and what that costs."""
    own = program()
    values = own.solve(roughly=False)
    return "".join("01"[round(v)] for v in values[::2]), float(values @ np.array(own.costs))


if __name__ == "__main__":
    highs.WORK = int(sys.argv[1])
    print(*solved())
