"""Integer programs: what is chosen of alternatives, exactly and roughly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from xla_dtensor.layouts.highs import ROUGHLY, IntegerProgram

COSTS = (3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0, 23.0)
SIZES = (0.11, 0.13, 0.17, 0.19, 0.23, 0.29, 0.31, 0.37)
ROOM = 0.835


def kept_or_cut(unavoidable: float) -> tuple[IntegerProgram, list[list[int]]]:
    """Eight tensors, each whole, or cut for what that costs; not all of them have room whole."""
    program, rows = IntegerProgram(), []
    for cost in COSTS:
        rows.append([program.variable(c + unavoidable, whole=True) for c in (0.0, cost)])
        program.one_of(rows[-1])
    program.at_most({row[0]: size for row, size in zip(rows, SIZES, strict=True)}, ROOM)
    return program, rows


def least() -> float:
    """By looking at all of them."""
    return min(
        sum(cost for cost, kept in zip(COSTS, ways, strict=True) if not kept)
        for ways in itertools.product((True, False), repeat=len(COSTS))
        if sum(size for size, kept in zip(SIZES, ways, strict=True) if kept) <= ROOM
    )


@pytest.mark.parametrize("unavoidable", [0.0, 1e6])
@pytest.mark.parametrize("roughly", [True, False])
def test_what_has_no_room_is_cut(roughly: bool, unavoidable: float) -> None:
    """What any solution costs doesn't count where one is to be nearly the best."""
    program, rows = kept_or_cut(unavoidable)
    found = program.solve(roughly)
    chosen = [int(np.argmax(found[row])) for row in rows]
    assert sum(size for size, cut in zip(SIZES, chosen, strict=True) if not cut) <= ROOM
    cost = sum(cost for cost, cut in zip(COSTS, chosen, strict=True) if cut)
    assert least() <= cost <= least() * (1 + ROUGHLY if roughly else 1)
    assert program.unavoidable == unavoidable * len(COSTS)


def test_nothing_has_room() -> None:
    program, rows = kept_or_cut(0.0)
    program.require([row[0] for row in rows], [], len(rows), len(rows))
    assert program.solve(roughly=False) is None
