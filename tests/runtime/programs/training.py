"""A small model trains on a 2x4 mesh, in however many processes: the losses, as JSON.

python -m tests.runtime.programs.training compiled eager
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import xla_dtensor as xd

STEPS = 4


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))


def batch(step: int) -> torch.Tensor:
    """Rows 0 to 3 are those of the first half of the devices, 4 to 7 of the second."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, to_devices, compiled: bool, to_number=lambda loss: loss.item()):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = xd.compile(step) if compiled else step
    return [to_number(step(to_devices(batch(i)))) for i in range(STEPS)]


def global_view(mesh, compiled: bool) -> list[float]:
    placements = {
        "0.weight": [Shard(1), Shard(0)],
        "0.bias": [Replicate(), Shard(0)],
        "2.weight": [Shard(0), Shard(1)],
        "2.bias": [Replicate(), Replicate()],
    }
    model = model_of()
    for name, where in placements.items():
        layer, _, own = name.partition(".")
        value = distribute_tensor(model.get_parameter(name).data, mesh, where)
        setattr(model[int(layer)], own, nn.Parameter(value))
    return train(model, lambda x: distribute_tensor(x, mesh, [Shard(0), Replicate()]), compiled)


def per_device(mesh, compiled: bool) -> list[float]:
    model = model_of().to("xla")
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    xd.fully_shard(model, mesh=mesh["dp"])
    own = slice(None) if xd.distributed.process_count() == 1 else [xd.distributed.process_index()]

    def to_devices(x):
        halves = x.reshape(2, 4, 16)[own].unbind(0)
        return xd.from_device_values(list(halves), mesh["dp"])

    def to_number(loss):
        return xd.collectives.all_reduce(loss, (mesh, "dp"), "avg").item()

    return train(model, to_devices, compiled, to_number)


def main() -> None:
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    found = {
        f"{view.__name__}, {how}": view(mesh, how == "compiled")
        for view in (global_view, per_device)
        for how in sys.argv[1:]
    }
    print("losses", json.dumps(found))


if __name__ == "__main__":
    main()
