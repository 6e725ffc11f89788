"""``torch.utils.checkpoint`` in a compiled step: the same numbers, less memory.

XLA's CPU backend orders operations for concurrency by default, whatever memory that takes (and a
compile option doesn't reach that switch, only ``XLA_FLAGS`` does), so the memory is looked at in a
process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.conftest import make_mesh

FOR_MEMORY = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        for _ in range(4):
            h = torch.tanh(h).sin()
        return x + self.dropout(self.down(h))


class Stack(nn.Module):
    def __init__(self, dim: int, layers: int, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def losses_and_memory(mesh: DeviceMesh, recompute: bool) -> tuple[list[float], int, int]:
    torch.manual_seed(0)
    model = Stack(32, 6, recompute)
    distribute_module(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = distribute_tensor(torch.randn(1024, 32), mesh, [Shard(0), Replicate()])

    def step() -> torch.Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = xd.compile(step)
    torch.manual_seed(1)
    losses = [compiled().item() for _ in range(3)]
    program = compiled.compiled_programs()[-1]
    tanhs = program.as_text().count(" tanh(")
    return losses, program.memory_analysis().temp_size_in_bytes, tanhs


def measure() -> None:
    """Both steps; printed as JSON."""
    mesh = make_mesh("2x4")
    print(json.dumps([losses_and_memory(mesh, recompute) for recompute in (False, True)]))


def scheduled_for_memory(module: str) -> Any:
    """What ``measure()`` of a module prints where XLA is told to schedule for memory."""
    result = subprocess.run(
        [sys.executable, "-c", f"from {module} import measure; measure()"],
        env=os.environ | {"XLA_FLAGS": FOR_MEMORY},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_recomputation_saves_memory_and_changes_no_number() -> None:
    measured = scheduled_for_memory(__name__)
    (kept, memory_kept, tanhs_kept), (again, memory_again, tanhs_again) = measured
    assert again == pytest.approx(kept, rel=1e-6)
    assert tanhs_again > tanhs_kept
    assert memory_again < 0.65 * memory_kept
