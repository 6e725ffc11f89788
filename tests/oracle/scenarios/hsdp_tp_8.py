"""HSDP x tensor parallel on a (2, 2, 2) mesh of eight devices."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.oracle._harness import Oracle

WORLD_SIZE = 8


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2, 2), ("replicate", "shard", "tp"))
    model = oracle.module(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    oracle.fully_shard(model, mesh=mesh["replicate", "shard"])
    for key, parameter in model.named_parameters():
        oracle.dump(f"initial.{key}", parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        x = oracle.local(f"x{step}", (3, 4), ("replicate", "shard"))
        y = model(x)
        oracle.dump(f"step{step}.y", y)
        (y - x).square().mean().backward()
        oracle.dump_step(f"step{step}", model, optimizer)
