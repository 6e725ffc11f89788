"""fully_shard of parameters whose first dim doesn't divide, or has fewer rows than devices."""

from __future__ import annotations

import torch
from torch import nn

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("dp",))
    model = oracle.module(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    oracle.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = oracle.local(f"x{step}", (5, 4), ("dp",))
        y = model(x)
        oracle.dump(f"step{step}.y", y)
        y.square().sum().backward()
        oracle.dump_step(f"step{step}", model, optimizer)
