"""ColwiseParallel on a linear: both kinds of output, three output layouts, sharded input."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.oracle._harness import Oracle

WORLD_SIZE = 4

CASES = {
    "default": {},
    "dtensor": {"use_local_output": False},
    "replicated": {"output_layouts": Replicate()},
    "replicated_dtensor": {"output_layouts": Replicate(), "use_local_output": False},
    "batch_in_batch_out": {"input_layouts": Shard(0), "output_layouts": Shard(0)},
}


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("tp",))
    for name, options in CASES.items():
        linear = oracle.module(lambda: nn.Linear(6, 8))
        parallelize_module(linear, mesh, ColwiseParallel(**options))
        vary = ("tp",) if "input_layouts" in options else ()
        x = oracle.local(f"{name}.x", (4, 6), vary, requires_grad=True)
        y = linear(x)
        oracle.dump(f"{name}.y", y)
        loss = y.square().sum()
        if name.endswith("dtensor"):
            loss = loss.full_tensor()
        oracle.dump(f"{name}.loss", loss)
        loss.backward()
        oracle.dump_grad(f"{name}.grad.x", x)
        oracle.dump_step(name, linear, torch.optim.SGD(linear.parameters(), lr=0.1))
