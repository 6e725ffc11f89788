"""Hybrid sharding: fully_shard on a (replicate, shard) mesh, with accumulation."""

from __future__ import annotations

import torch
from torch import nn

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2), ("replicate", "shard"))
    model = oracle.module(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    oracle.fully_shard(model[0], mesh=mesh)
    oracle.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            x = oracle.local(f"x{step}.{micro}", (3, 4), ("replicate", "shard"))
            y = model(x)
            oracle.dump(f"step{step}.{micro}.y", y)
            (y - x).square().mean().backward()
        oracle.dump_step(f"step{step}", model, optimizer)
