"""PrepareModuleInputOutput around local code: gathered inputs, sharded outputs."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInputOutput, parallelize_module

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


class Mixer(nn.Module):
    """Local code that needs the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.linear(x.transpose(0, 1)).transpose(0, 1).cumsum(0) * scale


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("tp",))
    for local in (True, False):
        name = "local" if local else "dtensor"
        mixer = oracle.module(Mixer)
        style = PrepareModuleInputOutput(
            input_layouts=(Shard(0), None),
            desired_input_layouts=(Replicate(), None),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=Shard(0),
            use_local_output=local,
        )
        parallelize_module(mixer, mesh, style)
        x = oracle.local(f"{name}.x", (2, 3), ("tp",), requires_grad=True)
        y = mixer(x, 0.5)
        oracle.dump(f"{name}.y", y)
        (y.square().sum() if local else y.square().sum().full_tensor()).backward()
        oracle.dump_grad(f"{name}.grad.x", x)
        # The linear is local code: each device's gradient is its own replica's.
        oracle.dump_step(name, mixer, torch.optim.SGD(mixer.parameters(), lr=0.1))
