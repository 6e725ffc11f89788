"""A program for torch_xla, run by `test_program` with no line of it changed."""

import sys

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch_xla.experimental.scan_layers import scan_layers
from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    SpmdFullyShardedDataParallel as FSDPv2,
)


def train(index: int, steps: int) -> None:
    xr.use_spmd()
    device = xm.xla_device()
    count = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(count), (count, 1), ("fsdp", "model"))
    xs.set_global_mesh(mesh)
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scan_layers(self.layers, x)

    model = FSDPv2(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = pl.MpDeviceLoader(
        [torch.ones(16, 16)] * steps,
        device,
        input_sharding=xs.ShardingSpec(mesh, ("fsdp", None)),
    )
    for step, x in enumerate(loader):
        with xp.StepTrace("train", step_num=step):
            loss = model(x).square().mean()
            loss.backward()
            xm.optimizer_step(optimizer)
            optimizer.zero_grad()
            xm.add_step_closure(lambda loss: print(f"loss {loss.item():.6f}"), args=(loss,))
        xm.mark_step()
    weight = torch.nn.Linear(16, 16).to(device).weight
    distribute_tensor(weight, init_device_mesh("xla", (count,)), [Shard(0)])
    xm.master_print("in place", isinstance(weight, xs.XLAShardedTensor))
    xm.master_print(count, xr.device_type(), met.counter_names() is not None, sys.argv[1:])


if __name__ == "__main__":
    xmp.spawn(train, args=(3,))
    assert torch_xla.__name__.endswith("torch_xla")
