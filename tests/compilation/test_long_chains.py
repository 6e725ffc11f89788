"""Long chains of objects, and of numbers: following them takes no stack of that depth."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch._higher_order_ops import flex_attention

import xla_dtensor as xd


class Node:
    def __init__(self, value: float, after: Any) -> None:
        self.value, self.after = value, after


def linked(length: int) -> Node:
    head = None
    for k in range(length):
        head = Node(float(k), head)
    assert head is not None
    return head


def test_a_linked_list_of_any_length() -> None:
    head = linked(3 * sys.getrecursionlimit())

    def last(x: torch.Tensor) -> torch.Tensor:
        node = head
        while node.after is not None:
            node = node.after
        return x * node.value

    compiled = xd.compile(last)
    x = torch.ones(2, device="xla")
    assert compiled(x)[0].item() == 0
    end = head
    while end.after is not None:
        end = end.after
    for value in (5.0, 6.0, 7.0):
        end.value = value
        assert compiled(x)[0].item() == value
    assert compiled.compilations == 2  # an input from its second value on
    end.after = Node(9.0, None)
    assert compiled(x)[0].item() == 9


@pytest.mark.parametrize("depth", [10, 100, 300])
def test_wrappers_around_wrappers(depth: int) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, inner: Any, scale: float) -> None:
            super().__init__()
            self.inner, self.scale = [inner], scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + 1

    module: Any = torch.nn.Identity()
    for k in range(depth):
        module = Scaled(module, float(k))
    innermost = module
    for _ in range(depth - 1):
        innermost = innermost.inner[0]

    def step(x: torch.Tensor) -> torch.Tensor:
        found = module
        while isinstance(found.inner[0], Scaled):
            found = found.inner[0]
        return found(x)

    compiled = xd.compile(step)
    x = torch.ones(2, device="xla")
    assert compiled(x)[0].item() == 1
    innermost.scale = 4.0
    assert compiled(x)[0].item() == 5
    innermost.register_forward_hook(lambda module, args, result: result * 2)
    assert compiled(x)[0].item() == 10


def test_caches_of_torchs_operators_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of selective checkpointing names operators, in which torch keeps what it has looked
    up so far."""
    saved = {torch.ops.aten.mm.default, flex_attention}
    name = "sc" + "ale"

    class Owner:
        scale = 2.0

    def step(x: torch.Tensor) -> torch.Tensor:
        kept = [operator for operator in saved if operator is not None]
        return x * getattr(Owner, name) * len(kept)

    compiled = xd.compile(step)
    x = torch.ones(2, device="xla")
    assert compiled(x)[0].item() == 4
    looked_up = {**flex_attention._dispatch_cache, torch._C.DispatchKey.Undefined: len}
    monkeypatch.setattr(flex_attention, "_dispatch_cache", looked_up)
    assert compiled(x)[0].item() == 4 and compiled.traces == 1


class Clock:
    by = 0.5


@pytest.mark.parametrize("audit", [None, 1])
@pytest.mark.parametrize("steps", [3, 2 * sys.getrecursionlimit()])
def test_a_number_that_a_loop_adds_to(steps: int, audit: int | None) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        now = 0.0
        for k in range(steps):
            now = now + Clock.by
            if k % 500 == 2:
                x = x + now
        return x * now

    compiled = xd.compile(step, audit=audit)
    for by in (0.5, 0.25, 0.125, 2.0, 0.5):
        Clock.by = by
        expected = step(torch.ones(2))
        torch.testing.assert_close(compiled(torch.ones(2, device="xla")).cpu(), expected)
    assert compiled.compilations == 2  # an input from its second value on
