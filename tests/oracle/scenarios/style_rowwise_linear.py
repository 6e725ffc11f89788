"""RowwiseParallel on a linear: both kinds of output, three output layouts, replicated input."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from tests.oracle._harness import Oracle

WORLD_SIZE = 4

CASES = {
    "default": {},
    "dtensor": {"use_local_output": False},
    "batch": {"output_layouts": Shard(0)},
    "batch_dtensor": {"output_layouts": Shard(0), "use_local_output": False},
    "features": {"output_layouts": Shard(-1)},
    "replicated_in": {"input_layouts": Replicate()},
}


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("tp",))
    for name, options in CASES.items():
        linear = oracle.module(lambda: nn.Linear(8, 12))
        parallelize_module(linear, mesh, RowwiseParallel(**options))
        if name == "replicated_in":
            x = oracle.local(f"{name}.x", (4, 8), requires_grad=True)
        else:
            x = oracle.local(f"{name}.x", (4, 2), ("tp",), requires_grad=True)
        y = linear(x)
        oracle.dump(f"{name}.y", y)
        loss = y.square().sum()
        if name.endswith("dtensor"):
            loss = loss.full_tensor()
        oracle.dump(f"{name}.loss", loss)
        loss.backward()
        oracle.dump_grad(f"{name}.grad.x", x)
        oracle.dump_step(name, linear, torch.optim.SGD(linear.parameters(), lr=0.1))
