"""The generator's counter: one operation, one number; taken and moved on in one step."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from xla_dtensor.base.random import rng
from xla_dtensor.dispatch import execute


def test_taking_is_advancing() -> None:
    torch.manual_seed(5)
    first, more, last = rng.default.take(), rng.default.take(3), rng.default.take()
    assert [s.tolist() for s in (first, more, last)] == [[5, 0, n, 0] for n in (0, 1, 4)]
    assert rng.position() == (5, 5)


def test_large_counters() -> None:
    torch.manual_seed(2**40 + 3)
    rng.advance(2**32 - 1)
    state = rng.default.take(2)
    assert state.tolist() == [3, 2**8, 2**32 - 1, 0]
    assert rng.words().tolist() == [3, 2**8, 1, 1]
    rng.default.give_back(state, 2)
    assert rng.words().tolist() == state.tolist()


def test_giving_back() -> None:
    torch.manual_seed(5)
    rng.default.give_back(rng.default.take(3), 3)
    assert rng.position() == (5, 0)
    lost = rng.default.take()
    rng.default.take()
    rng.default.give_back(lost)  # somebody has drawn since
    assert rng.position() == (5, 2)
    taken = rng.default.take()
    torch.manual_seed(6)
    rng.advance(3)
    rng.default.give_back(taken)
    assert rng.position() == (6, 3)


@pytest.mark.usefixtures("strict_eager")
def test_a_failed_operation_takes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.rand(3, 7, device="xla")
    torch.manual_seed(5)
    expected = torch.rand(3, 7, device="xla").cpu()

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        for plan in execute._plans.values():
            if getattr(plan, "random", False):
                patch.setattr(plan, "eager", fail)
        torch.manual_seed(5)
        with pytest.raises(RuntimeError, match="out of memory"):
            torch.rand(3, 7, device="xla")
    assert torch.equal(torch.rand(3, 7, device="xla").cpu(), expected)


def test_threads_draw_different_numbers() -> None:
    torch.rand(4, device="xla")
    draws: list[tuple[float, ...]] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        draws.extend(tuple(torch.rand(4, device="xla").tolist()) for _ in range(20))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        torch.manual_seed(0)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(draws) == len(set(draws)) == 80
    torch.manual_seed(0)
    assert set(draws) == {tuple(torch.rand(4, device="xla").tolist()) for _ in range(80)}
