"""Integer programs: what is chosen of alternatives, exactly and roughly."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.layouts.solving import hard_program
from xla_dtensor.layouts.solving import highs
from xla_dtensor.layouts.solving.highs import ROUGHLY, IntegerProgram

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


@pytest.mark.parametrize("unit", [1.0, 1e13])
def test_how_large_prices_are_changes_nothing(unit: float) -> None:
    program, _ = kept_or_cut(0.0)
    large, _ = kept_or_cut(0.0)
    large.costs = [unit * cost for cost in large.costs]
    np.testing.assert_array_equal(large.solve(roughly=False), program.solve(roughly=False))


def run(*, slowed: bool) -> str:
    """What the hard program in another process finds. Slowed, that is stopped again and again."""
    command = [sys.executable, "-m", "tests.layouts.solving.hard_program", "40000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while slowed and process.poll() is None:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(process.pid, number)
                time.sleep(0.05)
        found, _ = process.communicate()
    assert process.returncode == 0
    return found


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Others use all cores."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.slow
def test_the_machine_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the work ends a search, what it has found doesn't depend on how fast that was."""
    alone = run(slowed=False)
    with busy():
        assert run(slowed=True) == alone
    kept, cost = alone.split()
    monkeypatch.setattr(highs, "WORK", 400_000)
    assert hard_program.solved()[1] < float(cost)  # so the work has ended it
    assert 0 < kept.count("1") < hard_program.ITEMS


def test_the_clock_is_said_to_have_ended_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = hard_program.program()
    monkeypatch.setattr(highs, "SECONDS", 0.0)
    assert program.solve(roughly=False) is None
    assert program.by_clock and "stopped by the clock" in caplog.text
    monkeypatch.setattr(highs, "SECONDS", 600.0)
    monkeypatch.setattr(highs, "WORK", 1)
    other = hard_program.program()
    assert other.solve(roughly=False) is not None and not other.by_clock
