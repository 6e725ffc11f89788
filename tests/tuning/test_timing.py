"""How the best are timed: in turns, the slow ones once, and those that fail by their error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.tuning import Configuration, Trial, timing
from xla_dtensor.tuning.estimate import Estimate
from xla_dtensor.tuning.timing import timed


def trial(name: str, available: float | None = None) -> Trial:
    own = Configuration({name: 1}, (0,))
    return Trial(own, Estimate(0.0, 8.0, 0.0, None, {}), available=available)


class Machine:
    """Makes steps that take so long by a clock of its own; the one that is called ``busy`` is slow
    in the first round it is made."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, milliseconds: dict[str, float], busy: str = ""
    ) -> None:
        self.milliseconds, self.busy, self.made = milliseconds, busy, list[str]()
        self.now = 0.0
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)

    def make(self, own: Configuration) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        (name,) = own.mesh
        if name == "refused":
            raise UnsupportedOpError("no")
        slow = name == self.busy and name not in self.made
        self.made.append(name)
        seconds = self.milliseconds[name] / 1e3 * (1.4 if slow else 1)

        def step(_: float) -> None:
            self.now += seconds

        return step, (1.0,)


def test_a_busy_moment_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"a": 20, "b": 25}, busy="a")
    found = timed({0: trial("a"), 1: trial("b")}, machine.make)
    assert machine.made == ["a", "b"] * 3
    assert found[0].measured == pytest.approx(0.02) and found[1].measured == pytest.approx(0.025)


def test_the_slow_the_large_and_the_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"a": 5, "slow": 50, "large": 1})
    trials = {3: trial("slow"), 4: trial("large", 4.0), 5: trial("refused"), 7: trial("a")}
    found = timed(trials, machine.make)
    assert machine.made.count("slow") == 1 and machine.made.count("a") == 3
    assert found[3].measured == pytest.approx(0.05) and found[7].measured == pytest.approx(0.005)
    assert found[4] is trials[4]  # it doesn't fit, and isn't run
    assert found[5].error == "UnsupportedOpError: no" and not found[5].fits
    assert min(found.values(), key=Trial.rank) is found[7]


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    large = {0: trial("large", 4.0)}
    assert timed(large, Machine(monkeypatch, {}).make) == large
