"""XLA's temporaries of a step fall with the memory budget.

Looked at in a process of its own, as in `test_checkpointing.py`: XLA's CPU backend has to be told
to schedule for memory.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch._functorch.config as functorch
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import xla_dtensor as xd
from tests.compilation.test_checkpointing import Stack, scheduled_for_memory
from tests.conftest import make_mesh

BUDGETS = (1, 0.75, 0.5, 0.25)


def temporaries(budget: float) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    mesh = make_mesh("2x4")
    model = Stack(32, 6, recompute=False)
    distribute_module(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = distribute_tensor(torch.randn(1024, 32), mesh, [Shard(0), Replicate()])

    def step() -> torch.Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = xd.compile(step)
    torch.manual_seed(1)
    with functorch.patch(activation_memory_budget=budget):
        losses = [compiled().item() for _ in range(2)]
    (program,) = compiled.compiled_programs()
    return program.memory_analysis().temp_size_in_bytes, losses


def measure() -> None:
    print(json.dumps([temporaries(budget) for budget in BUDGETS]))


@pytest.mark.slow
def test_temporaries() -> None:
    found = scheduled_for_memory(__name__)
    assert len({tuple(losses) for _, losses in found}) == 1
    everything, *less = [size for size, _ in found]
    assert everything > less[0] > less[1]
    assert less[1] < 0.6 * everything
    assert less[2] < 0.6 * everything
