"""Data parallelism by hand: local parameters, each device its own batch, gradients all-reduced."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("dp",))
    model = oracle.module(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        x = oracle.local(f"x{step}", (3, 4), ("dp",))
        loss = (model(x) - x).square().mean()
        oracle.dump(f"step{step}.loss", loss)
        oracle.dump(f"step{step}.mean", funcol.all_reduce(loss.detach(), "avg", mesh))
        loss.backward()
        for key, parameter in model.named_parameters():
            oracle.dump_grad(f"step{step}.own.{key}", parameter)
            parameter.grad = funcol.wait_tensor(funcol.all_reduce(parameter.grad, "avg", mesh))
        oracle.dump_step(f"step{step}", model, optimizer)
