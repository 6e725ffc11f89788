"""fully_shard with gradient accumulation, with and without a reduction per microbatch."""

from __future__ import annotations

import torch
from torch import nn

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("dp",))
    for late in (False, True):
        name = "late" if late else "each"
        model = oracle.module(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
        oracle.fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
        oracle.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for micro in range(3):
            if late:
                model.set_requires_gradient_sync(micro == 2)
            x = oracle.local(f"x{micro}", (3, 4), ("dp",))
            loss = model(x).square().mean() / 3
            oracle.dump(f"{name}.loss{micro}", loss)
            loss.backward()
        oracle.dump_step(name, model, optimizer)
