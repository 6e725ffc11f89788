"""What Python's collector visits while a step is traced, and calls."""

from __future__ import annotations

import gc

import torch

import xla_dtensor as xd
from xla_dtensor.compilation.code.garbage import NewObjects


def test_only_new_objects_are_visited() -> None:
    """Also where Python has frozen objects of its own when it started (3.12)."""
    before = [[]]
    with NewObjects() as new:
        inside = [[]]
        found = new.made()
    assert found is not None
    assert id(inside) in found and id(before) not in found


def test_what_somebody_else_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with NewObjects() as new:
            assert new.made() is None
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()


def test_what_a_collection_calls_is_not_the_steps() -> None:
    """`gc.callbacks` run at any moment. What they count was counted once more in each call, as
    something that the step changes."""
    counted = [0]

    def count(phase: str, info: dict[str, int]) -> None:
        counted[0] += phase == "start" and info["generation"] == 2

    def full() -> int:
        return gc.get_stats()[2]["collections"]

    weight = torch.ones(3, device="xla")

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        gc.collect()  # in the middle of a trace, as one may come by itself
        return x * weight

    gc.callbacks.append(count)
    try:
        before = full() - counted[0]
        for value in (1.0, 2.0, 3.0):
            result = step(torch.full((3,), value, device="xla"))
            assert result.tolist() == [value] * 3
        assert full() - counted[0] == before
    finally:
        gc.callbacks.remove(count)
    assert step.compilations == 1 and len(step.recompilations) == 0
