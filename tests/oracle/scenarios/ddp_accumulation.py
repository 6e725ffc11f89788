"""replicate (DDP) with accumulation: between reductions each device keeps its own gradient."""

from __future__ import annotations

import torch
from torch import nn

from tests.oracle._harness import Oracle

WORLD_SIZE = 2


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2,), ("dp",))
    model = oracle.module(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    oracle.replicate(model, device_mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            x = oracle.local(f"x{step}.{micro}", (3, 4), ("dp",))
            (model(x).square().mean() / 3).backward()
            for key, parameter in model.named_parameters():
                oracle.dump_grad(f"step{step}.{micro}.{key}", parameter, layout=False)
        oracle.dump_step(f"step{step}", model, optimizer, layout=False)
