"""Two processes of four devices train as CPU torch does."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from tests import launch
from tests.runtime.programs.training import STEPS, batch, model_of


def reference() -> list[float]:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for i in range(STEPS):
        loss = model(batch(i)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compiled", "eager"])
def test_two_processes_of_four_devices(how: str) -> None:
    run = launch.run(["-m", "tests.runtime.programs.training", how], 2, 240)
    outputs = launch.succeeded(run)
    for output in outputs:
        (line,) = [line for line in output.splitlines() if line.startswith("losses ")]
        found = json.loads(line.partition(" ")[2])
        assert len(found) == 2
        for name, losses in found.items():
            assert losses == pytest.approx(reference(), abs=2e-6), name
    started = [line for line in outputs[0].splitlines() if "coordinated by" in line]
    assert len(started) == 1 and "process 0 of 2" in started[0]
    assert "with 4 of 8 cpu devices" in started[0] and "coordinated by" not in outputs[1]
