"""fully_shard with a shard_placement_fn: Shard(1) for the weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Shard

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def placement(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("dp",))
    model = oracle.module(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    oracle.fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        y = model(oracle.local(f"x{step}", (3, 4), ("dp",)))
        oracle.dump(f"step{step}.y", y)
        y.square().mean().backward()
        oracle.dump_step(f"step{step}", model, optimizer)
