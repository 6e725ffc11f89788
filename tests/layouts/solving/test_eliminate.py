"""Sums of functions of one or two variables, against all values that there are."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from xla_dtensor.layouts.solving.eliminate import Sum

Function = tuple[tuple[int, ...], np.ndarray]


def drawn(rng: random.Random) -> tuple[list[int], list[Function]]:
    """How many values variables have, and functions of them: chains, trees, circles."""
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 6))]
    functions: list[Function] = []
    for _ in range(rng.randint(0, 9)):
        some = tuple(rng.sample(range(len(sizes)), min(rng.randint(0, 2), len(sizes))))
        costs = [rng.randint(0, 9) for _ in range(int(np.prod([sizes[v] for v in some])))]
        functions.append((some, np.array(costs, float).reshape([sizes[v] for v in some])))
    return sizes, functions


def cost(values: dict[int, int], functions: list[Function]) -> float:
    return sum(float(costs[tuple(values[v] for v in some)]) for some, costs in functions)


@pytest.mark.parametrize("seed", range(100))
def test_the_least(seed: int) -> None:
    rng = random.Random(seed)
    sizes, functions = drawn(rng)
    own = [([float(rng.randint(0, 9)) for _ in range(n)]) for n in sizes]
    total: Sum[int] = Sum()
    for variable, costs in enumerate(own):
        total.variable(variable, costs)
    for some, costs in functions:
        total.add(some, costs)
    kept = {v for v in range(len(sizes)) if rng.random() < 0.2}
    total.eliminate(kept)
    left = [*total.own]
    assert kept <= {*left}

    def rest(values: dict[int, int]) -> float:
        by_themselves = sum(float(total.own[v][values[v]]) for v in left)
        return by_themselves + sum(float(c[values[a], values[b]]) for a, b, c in total.pairs())

    every = [
        dict(zip(left, v, strict=True)) for v in itertools.product(*(range(sizes[v]) for v in left))
    ]
    best = dict(min(every, key=rest))
    total.complete(best)
    everything = functions + [((v,), np.array(costs)) for v, costs in enumerate(own)]
    found = cost(best, everything)
    whole = itertools.product(*map(range, sizes))
    assert found == min(cost(dict(enumerate(values)), everything) for values in whole)


def test_a_chain_goes() -> None:
    chain: Sum[int] = Sum()
    for variable in range(1000):
        chain.variable(variable, [0.0, 0.1])
    for variable in range(999):
        chain.add((variable, variable + 1), np.array([[5.0, 1.0], [1.0, 5.0]]))  # as neighbours not
    chain.eliminate({0, 999})
    assert [*chain.own] == [0, 999] and len([*chain.pairs()]) == 1
    values = {0: 0, 999: 0}
    chain.complete(values)
    assert sum(a == b for a, b in itertools.pairwise(values[v] for v in range(1000))) == 1
