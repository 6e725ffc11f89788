"""`lower()` shows the program that the call runs, and changes nothing of the step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
from xla_dtensor.compilation.program.program import Program


class Holder:
    """A counter that the step keeps."""

    def __init__(self) -> None:
        self.count = 0.0


def numbers() -> tuple[Callable[..., Any], list[Any]]:
    return lambda x, s: x * s, [(0.5,), (0.25,), (0.75,), (0.75,), (0.5,)]


def positions() -> tuple[Callable[..., Any], list[Any]]:
    return lambda x, n: x[n].sin() + x[: n + 1].sum(), [(0,), (1,), (2,), (1,)]


def counter() -> tuple[Callable[..., Any], list[Any]]:
    holder = Holder()

    def step(x: torch.Tensor) -> torch.Tensor:
        holder.count += 1
        return x * holder.count

    return step, [()] * 4


def outside() -> tuple[Callable[..., Any], list[Any]]:
    holder = Holder()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * holder.count

    def changed(count: float) -> tuple[()]:
        holder.count = count
        return ()

    return step, [lambda c=c: changed(c) for c in (1.0, 2.0, 3.0, 3.0)]


def optimizer() -> tuple[Callable[..., Any], list[Any]]:
    weight = torch.nn.Parameter(torch.ones(4, device="xla"))
    adam = torch.optim.AdamW([weight])

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (weight * x).sum()
        loss.backward()
        adam.step()
        adam.zero_grad()
        return loss.detach()

    return step, [()] * 3


@pytest.mark.parametrize("case", [numbers, positions, counter, outside, optimizer])
def test_lower_shows_what_the_call_runs(
    case: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, given = case()
    step, x = xd.compile(function), torch.arange(4.0).to("xla")
    ran: list[Any] = []
    run = Program.launch
    monkeypatch.setattr(Program, "launch", lambda self, call: ran.append(self) or run(self, call))
    for arguments in given:
        arguments = arguments() if callable(arguments) else arguments
        before = step.traces, step.compilations, list(step.recompilations)
        shown = step.lower(x, *arguments).as_text()
        assert (step.traces, step.compilations, step.recompilations) == before
        again = step.lower(x, *arguments).as_text()
        assert again == shown
        step(x, *arguments)
        assert hashlib.sha256(shown.encode()).hexdigest()[:16] == ran[-1].executable.digest, shown


def test_plans_are_of_padded_arguments(mesh_2x4: DeviceMesh) -> None:
    """As those of a call, and not the program of the lengths that are given."""

    def mean(tokens: torch.Tensor, n: int) -> torch.Tensor:
        inside = torch.arange(tokens.shape[0], device=tokens.device) < n
        return torch.where(inside, tokens, 0.0).sum() / n

    step = xd.compile(mean, buckets={"tokens": xd.Buckets(0, (8, 16), length="n")})
    reports = [
        xd.plan(step, xd.distribute_tensor(torch.ones(n), mesh_2x4, [xd.Replicate()] * 2))
        for n in (5, 7, 9)
    ]
    first, same, larger = [report.memory.arguments for report in reports]
    assert first == same == larger - 8 * 4 and step.traces == 0
