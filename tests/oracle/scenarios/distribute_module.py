"""distribute_module with functions of one's own: partition, input_fn and output_fn."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        weight = distribute_tensor(module.weight.data, mesh, [Replicate(), Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))


def shard_batch(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return tuple(DTensor.from_local(x, mesh, [Shard(0), Replicate()]) for x in inputs)


def local_batch(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    return output.redistribute(placements=[Shard(0), Replicate()]).to_local()


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2), ("dp", "tp"))
    model = oracle.module(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))
    distribute_module(model, mesh, partition, shard_batch, local_batch)
    for key, parameter in model.named_parameters():
        oracle.dump(f"initial.{key}", parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = oracle.local(f"x{step}", (3, 4), ("dp",), requires_grad=True)
        y = model(x)
        oracle.dump(f"step{step}.y", y)
        y.square().sum().backward()
        oracle.dump_grad(f"step{step}.grad.x", x)
        oracle.dump_step(f"step{step}", model, optimizer)
