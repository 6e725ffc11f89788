"""Who runs operations: the stack, what it begins with, and how short the way is."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tools.package_calls import package_calls
from xla_dtensor.base import executor
from xla_dtensor.execution import batched
from xla_dtensor.execution.abstract import Abstract
from xla_dtensor.execution.batch import Batch
from xla_dtensor.execution.lazy import Lazy
from xla_dtensor.execution.nested import Nested
from xla_dtensor.execution.strict import Strict


def kind() -> type:
    return type(executor.current())


def test_what_a_thread_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind() is Lazy
    monkeypatch.setattr(xd.config, "eager", "strict")
    assert kind() is Strict
    with xd.abstract("cpu:8"):
        assert kind() is Abstract
        with executor.running_at_once():
            assert kind() is Abstract  # there are no values
    assert kind() is Strict
    monkeypatch.setattr(xd.config, "eager", "lazy")
    with executor.running_at_once():
        assert kind() is Strict
    assert kind() is Lazy


def test_an_observer_sees_each_operation() -> None:
    seen: list[type] = []
    xd.explain(lambda: seen.append(kind()))
    assert seen == [Strict] and kind() is Lazy


def test_blocks_are_put_back_after_an_exception() -> None:
    with pytest.raises(ValueError, match="mine"), batched():
        assert kind() is Batch
        with executor.running(Nested(lambda: None, "aten::add")) as inner:
            assert executor.trace() is inner and executor.is_in_step()
            with executor.running_at_once():
                assert executor.trace() is None and not executor.is_in_step()
            with batched():  # a part of what is around it
                assert executor.current() is inner
            raise ValueError("mine")
    assert kind() is Lazy and executor.enclosing() is None


def test_threads_have_their_own() -> None:
    found: list[Any] = []
    with batched():
        thread = threading.Thread(target=lambda: found.append(executor.current()))
        thread.start()
        thread.join()
    assert type(found[0]) is Lazy and found[0] is not executor.current()


def test_a_step_is_traced_by_its_trace() -> None:
    found: list[Any] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        found.append((executor.trace() is executor.current(), executor.is_in_step()))
        return x * 2

    xd.compile(step)(torch.ones(2, device="xla"))
    assert found == [(True, True)] and executor.trace() is None
    xd.compile(step, watch="replay")(torch.ones(2, device="xla"))
    assert found[1] == (False, True) and not executor.is_in_step()


@pytest.mark.parametrize(("eager", "most"), [("lazy", 28), ("strict", 28)])
def test_an_addition_takes_few_calls(
    eager: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xd.config, "eager", eager)
    x, y = torch.randn(4, 4).to("xla"), torch.randn(4, 4).to("xla")
    kept = [x + y for _ in range(3)]
    found = package_calls(lambda: kept.append(x + y))
    assert sum(found.values()) <= most, found.most_common()
