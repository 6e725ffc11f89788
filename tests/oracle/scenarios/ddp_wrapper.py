"""DistributedDataParallel: accumulation in no_sync, also around forward or backward alone, and
buffers, which are those of the first device in each forward."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.oracle._harness import Oracle

WORLD_SIZE = 2


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2,), ("dp",))
    model = oracle.module(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    ).to(oracle.device)
    model.register_buffer("own", oracle.local("own", (2,), ("dp",)))
    ddp = DistributedDataParallel(model, device_mesh=mesh)
    oracle.dump("own", model.own, layout=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def state(name: str) -> None:
        for key, value in ddp.state_dict().items():
            oracle.dump(f"{name}.{key}", value, layout=False)
        for key, parameter in ddp.named_parameters():
            if parameter.grad is not None:
                oracle.dump_grad(f"{name}.grad.{key}", parameter, layout=False)

    def loss(name: str) -> torch.Tensor:
        return ddp(oracle.local(name, (5, 4), ("dp",))).square().mean()

    for step in range(2):
        with ddp.no_sync():
            loss(f"x{step}.0").backward()
            state(f"step{step}.unreduced")
            loss(f"x{step}.1").backward()
            state(f"step{step}.again")
        loss(f"x{step}.2").backward()
        state(f"step{step}.reduced")
        optimizer.step()
        optimizer.zero_grad()
        state(f"step{step}.updated")
    with ddp.no_sync():
        outside = loss("forward_alone")
    outside.backward()
    state("forward_alone")
    optimizer.zero_grad()
    inside = loss("backward_alone")
    with ddp.no_sync():
        inside.backward()
    state("backward_alone")
    ddp.eval()
    with torch.no_grad():
        oracle.dump("eval", ddp(oracle.local("eval", (5, 4), ("dp",))), layout=False)
    state("eval")
