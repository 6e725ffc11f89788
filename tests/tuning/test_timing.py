"""How the best are timed: in turns, the slow ones once, and those that fail by their error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.tuning import Configuration, Trial
from xla_dtensor.tuning.estimate import Estimate
from xla_dtensor.tuning.timing import timed


def trial(name: str, available: float | None = None) -> Trial:
    own = Configuration({name: 1}, (0,))
    return Trial(own, Estimate(0.0, 8.0, 0.0, None, {}), available=available)


class Machine:
    """Makes steps that sleep; one that is told ``busy`` is slow in the first round it is made."""

    def __init__(self, milliseconds: dict[str, float], busy: str = "") -> None:
        self.milliseconds, self.busy, self.made = milliseconds, busy, list[str]()

    def make(self, own: Configuration) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        (name,) = own.mesh
        if name == "refused":
            raise UnsupportedOpError("no")
        slow = name == self.busy and name not in self.made
        self.made.append(name)
        seconds = self.milliseconds[name] / 1e3 * (1.4 if slow else 1)
        return lambda x: time.sleep(seconds), (1.0,)


def test_a_busy_moment_does_not_decide() -> None:
    machine = Machine({"a": 20, "b": 25}, busy="a")
    found = timed({0: trial("a"), 1: trial("b")}, machine.make)
    assert machine.made == ["a", "b"] * 3
    assert found[0].measured is not None and found[1].measured is not None
    assert 0.02 <= found[0].measured < found[1].measured


def test_the_slow_the_large_and_the_refused() -> None:
    machine = Machine({"a": 5, "slow": 50, "large": 1})
    trials = {3: trial("slow"), 4: trial("large", 4.0), 5: trial("refused"), 7: trial("a")}
    found = timed(trials, machine.make)
    assert machine.made.count("slow") == 1 and machine.made.count("a") == 3
    assert found[3].measured is not None and found[3].measured >= 0.05
    assert found[4] is trials[4]  # it doesn't fit, and isn't run
    assert found[5].error == "UnsupportedOpError: no" and not found[5].fits
    assert min(found.values(), key=Trial.rank) is found[7]


def test_nothing_fits() -> None:
    large = {0: trial("large", 4.0)}
    assert timed(large, Machine({}).make) == large
