"""Errors of Python's arithmetic that a step's code catches: whether there is one is a decision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import xla_dtensor as xd


def divided(x: torch.Tensor, n: float) -> torch.Tensor:
    try:
        factor = 1 / n
    except ZeroDivisionError:
        factor = 100.0
    return x * factor


def divided_for_nothing(x: torch.Tensor, n: float) -> torch.Tensor:
    y = x * n
    try:
        1 / n
        more = 1.0
    except ZeroDivisionError:
        more = 5.0
    return y + more


def root(x: torch.Tensor, n: float) -> torch.Tensor:
    y = x * n
    try:
        math.sqrt(n)
    except ValueError:
        y = y + 5
    return y


def remainder(x: torch.Tensor, n: float) -> torch.Tensor:
    try:
        x = x * (7 % n)
    except ZeroDivisionError:
        return x * 99
    return x + n


def power(x: torch.Tensor, n: float) -> torch.Tensor:
    try:
        scale = 10.0 ** (n * 200)
    except OverflowError:
        scale = 3.0
    return x * min(scale, 9.0)


def chain(x: torch.Tensor, n: float) -> torch.Tensor:
    total = 0.0
    for k in range(60):
        try:
            total = total + 1 / (n - k)
        except ZeroDivisionError:
            total = total + 1
    return x * total


def uncaught(x: torch.Tensor, n: float) -> torch.Tensor:
    1 / n
    return x * 2


class Options:
    n = 1.0


VALUES = (1.0, 2.0, 3.0, 0.0, 4.0, 0.0, -1.0, 2.0, 0.5)
FUNCTIONS = (divided, divided_for_nothing, root, remainder, power, chain, uncaught)


@pytest.mark.parametrize("as_argument", [True, False], ids=["argument", "attribute"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_it_goes_the_way_that_python_goes(
    function: Callable[..., torch.Tensor], as_argument: bool
) -> None:
    def run(step: Callable[..., Any], x: torch.Tensor) -> list[Any]:
        found: list[Any] = []
        for value in VALUES:
            Options.n = value
            try:
                found.append(step(x, value)[0].item() if as_argument else step(x)[0].item())
            except ZeroDivisionError as error:
                found.append(str(error))
        return found

    def step(x: torch.Tensor, *n: float) -> torch.Tensor:
        return function(x, n[0] if as_argument else Options.n)

    compiled = xd.compile(step, watch="trace")
    expected = run(step, torch.ones(2))
    found = run(compiled, torch.ones(2, device="xla"))
    assert found == [e if isinstance(e, str) else pytest.approx(e, rel=1e-6) for e in expected]
    if function not in (chain, power):  # which decide more
        assert compiled.compilations <= 4  # a value as a constant, and as an input, each way
