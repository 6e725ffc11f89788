"""Programs that nobody has used for long go when there are many."""

from __future__ import annotations

import pytest
import torch

import xla_dtensor as xd
from xla_dtensor.base.tables import cache as tables
from xla_dtensor.runtime import live_programs
from xla_dtensor.runtime.jax_runtime import ProgramBound


def run(lengths: range) -> None:
    for n in lengths:
        x = torch.ones(n, 3, device="xla")
        assert (x @ x.T).sum().item() == 3 * n * n


@pytest.mark.slow
def test_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    xd.debug.clear_caches()
    before = live_programs()[0]
    bound = ProgramBound(before + 10)
    monkeypatch.setattr(tables, "_watchers", [bound.look])
    monkeypatch.setattr(tables, "_EVERY", 16)
    run(range(1, 40))
    assert live_programs()[0] < before + 40


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layouts", [None, "torch"])
def test_a_step_that_is_held_stays(monkeypatch: pytest.MonkeyPatch, layouts: str | None) -> None:
    step = xd.compile(lambda x: (x * 2).sum(), layouts=layouts)
    x = torch.ones(5, device="xla")
    assert step(x).item() == 10
    traces = step.traces
    monkeypatch.setattr(tables, "_watchers", [ProgramBound(0).look])
    monkeypatch.setattr(tables, "_EVERY", 4)
    run(range(80, 90))
    assert step(x).item() == 10
    assert step.traces == traces


def test_values_are_right_whatever_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a training whose tensors, views and gradients are there."""
    monkeypatch.setattr(tables, "_watchers", [tables.forget_older])
    monkeypatch.setattr(tables, "_EVERY", 1)
    losses: list[list[float]] = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses.append([])
        for n in range(3, 8):
            loss = model(torch.ones(n, 4, device=device)[1:]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[1], losses[0])
