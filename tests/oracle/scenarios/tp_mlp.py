"""A Colwise-Rowwise MLP and AdamW, three steps: the plan of torch's tensor-parallel tutorial."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("tp",))
    model = oracle.module(
        lambda: nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6, bias=False))
    )
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        x = oracle.local(f"x{step}", (5, 6))
        y = model(x)
        loss = (y - x).square().mean()
        oracle.dump(f"step{step}.y", y)
        oracle.dump(f"step{step}.loss", loss)
        loss.backward()
        oracle.dump_step(f"step{step}", model, optimizer)
