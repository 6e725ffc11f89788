"""Gradient clipping by norm over fully_shard's sharded gradients, and the norm itself."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("dp",))
    model = oracle.module(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    oracle.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = oracle.local(f"x{step}", (3, 4), ("dp",))
        (10 * model(x).square().sum()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        oracle.dump(f"step{step}.norm", norm.full_tensor())
        oracle.dump_step(f"step{step}", model, optimizer)
