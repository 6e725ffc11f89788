"""How short the way of a call is that finds everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor.experimental  # its context parallelism is asked about in each call
from torch import nn

import xla_dtensor as xd
from tools.package_calls import package_calls


def forward() -> Callable[..., Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to("xla")
    return lambda x: model(x)


def training() -> Callable[..., Any]:
    model = nn.Linear(4, 4).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def inference() -> Callable[..., Any]:
    step = forward()
    return torch.no_grad()(step)


@pytest.mark.parametrize(
    ("case", "most"), [(inference, 64), (training, 74)], ids=lambda v: getattr(v, "__name__", v)
)
def test_few_functions_are_called(case: Callable[[], Callable[..., Any]], most: int) -> None:
    step, x = xd.compile(case(), audit=0), torch.randn(2, 4).to("xla")
    for _ in range(3):
        step(x)
    traces = step.traces
    found = package_calls(lambda: step(x))
    assert step.traces == traces and sum(found.values()) <= most, found.most_common()


@pytest.mark.parametrize("count", [1, 40])
def test_no_function_is_called_for_each_parameter(count: int) -> None:
    """What is compared and written back is lists, gone through in C."""
    parameters = [torch.ones(2, device="xla", requires_grad=True) for _ in range(count)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def step() -> None:
        sum(p.sum() for p in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = xd.compile(step, audit=0)
    for _ in range(3):
        compiled()
    assert sum(package_calls(compiled).values()) <= 70
