"""fully_shard on one mesh dim, nested: gradients, AdamW, three steps, each device its own batch."""

from __future__ import annotations

import torch
from torch import nn

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("dp",))
    model = oracle.module(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    for layer in (model[0], model[2]):
        oracle.fully_shard(layer, mesh=mesh)
    oracle.fully_shard(model, mesh=mesh)
    for key, parameter in model.named_parameters():
        oracle.dump(f"initial.{key}", parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        x = oracle.local(f"x{step}", (3, 4), ("dp",), requires_grad=True)
        y = model(x)
        oracle.dump(f"step{step}.y", y)
        loss = (y - x).square().mean()
        oracle.dump(f"step{step}.loss", loss)
        loss.backward()
        oracle.dump_grad(f"step{step}.grad.x", x)
        oracle.dump_step(f"step{step}", model, optimizer)
