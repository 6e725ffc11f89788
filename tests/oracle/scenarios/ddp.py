"""replicate (DDP): gradients averaged over all devices, two steps."""

from __future__ import annotations

import torch
from torch import nn

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("dp",))
    model = oracle.module(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    oracle.replicate(model, device_mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        x = oracle.local(f"x{step}", (3, 4), ("dp",))
        y = model(x)
        oracle.dump(f"step{step}.y", y)
        (y - x).square().mean().backward()
        # Whether the parameters are plain tensors or replicated DTensors is left open.
        oracle.dump_step(f"step{step}", model, optimizer, layout=False)
