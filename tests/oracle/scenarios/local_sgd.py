"""Local SGD: the devices' parameters drift apart, and are averaged every second step. They start
out the same, and take different gradients in place."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2), ("outer", "inner"))
    model = oracle.module(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x = oracle.local(f"x{step}", (3, 4), ("outer", "inner"))
        y = model(x)
        oracle.dump(f"step{step}.y", y)
        (y - x).square().mean().backward()
        oracle.dump_step(f"step{step}", model, optimizer)
        if step % 2:
            group = mesh["inner"] if step == 1 else mesh._flatten("all")
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    parameter.copy_(funcol.all_reduce(parameter, "avg", group))
                    oracle.dump(f"step{step}.averaged.{key}", parameter)
