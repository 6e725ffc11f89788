"""Python integers that JAX doesn't take, or that a composition of torch's has no symbol for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import xla_dtensor as xd

CALLS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "x - n": lambda x, n: x - n,
    "n - x": lambda x, n: n - x,
    "x + n": lambda x, n: x + n,
    "x * n": lambda x, n: x * n,
    "x / n": lambda x, n: x / n,
    "x // n": lambda x, n: x // n,
    "x == n": lambda x, n: x == n,
    "x < n": lambda x, n: x < n,
    "x ^ n": lambda x, n: x ^ n,
    "add_": lambda x, n: x.clone().add_(n),
    "fill_": lambda x, n: x.clone().fill_(n),
    "full_like": torch.full_like,
    "where": lambda x, n: torch.where(x > 1, x, n),
    "masked_fill": lambda x, n: x.masked_fill(x > 1, n),
    "clamp": lambda x, n: x.clamp(max=n),
    "foreach_add": lambda x, n: torch._foreach_add([x], n)[0],
    "foreach_mul": lambda x, n: torch._foreach_mul([x], n)[0],
    "foreach_add_": lambda x, n: (lambda lists: (torch._foreach_add_(lists, n), lists[0])[1])(
        [x.clone()]
    ),
}
NUMBERS = [2**63, 2**64 - 1, 2**63 - 1, -(2**63), 2**40]

CONVERTED: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    **{name: CALLS[name] for name in ("fill_", "full_like", "masked_fill", "clamp")},
    "x[0] = n": lambda x, n: x.clone().index_fill_(0, torch.tensor([0], device=x.device), n),
    "scatter": lambda x, n: x.scatter(0, torch.tensor([0], device=x.device), n),
    "threshold": lambda x, n: torch.nn.functional.threshold(x, 1, n),
    "pad": lambda x, n: torch.nn.functional.pad(x, (1, 0), value=n),
}


def outcome(function: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    try:
        return function().cpu()
    except (RuntimeError, OverflowError, TypeError):
        return None


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("name", list(CALLS))
def test_numbers_are_what_they_are_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    function = CALLS[name]
    start = torch.tensor([3, 0, 1, 2]).to(dtype)
    x = start.to("xla")
    numbers = [*NUMBERS, 1j] if name.startswith("foreach_") and name[-1] != "_" else NUMBERS
    if name == "x // n" and dtype is torch.int32:
        numbers = NUMBERS[2:]  # 2**63 is 0 there, and what is more refused
    for number in numbers:
        expected = outcome(lambda number=number: function(start, number))
        actual = outcome(lambda number=number: function(x, number))
        if expected is None:
            # Of numbers of 64 bits torch also refuses what doesn't fit a smaller type; XLA wraps.
            assert actual is None or number in (-(2**63), 2**63 - 1, 2**40), number
            continue
        assert actual is not None, number
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("name", list(CONVERTED))
def test_numbers_that_the_dtype_does_not_have(name: str, dtype: torch.dtype) -> None:
    function = CONVERTED[name]
    start = torch.tensor([3, 0, 1, 2]).to(dtype)
    refused = 0
    for number in (200, -100, 300, 2**40, 1e39, -1e39, math.inf, 1j):
        expected = outcome(lambda number=number: function(start, number))
        if expected is None:
            refused += 1
            with pytest.raises((RuntimeError, TypeError)):
                function(start.to("xla"), number)
        else:
            actual = function(start.to("xla"), number)
            torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)
    assert refused


def test_in_compiled_steps() -> None:
    start = torch.tensor([3, 0, 1, 2])

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch._foreach_add([x - 2**63], 2**40 + 1)[0]

    assert torch.equal(xd.compile(step)(start.to("xla")).cpu(), step(start))
