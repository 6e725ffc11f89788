"""PrepareModuleOutput: Partial, sharded and replicated outputs, a None among them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleOutput, parallelize_module

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.sum(0)


class One(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("tp",))
    for local in (True, False):
        name = "local" if local else "dtensor"
        pair = Pair()
        style = PrepareModuleOutput(
            output_layouts=(Shard(0), None),
            desired_output_layouts=(Shard(1), Replicate()),
            use_local_output=local,
        )
        parallelize_module(pair, mesh, style)
        x = oracle.local(f"{name}.x", (2, 8), ("tp",), requires_grad=True)
        y, untouched = pair(x)
        oracle.dump(f"{name}.y", y)
        oracle.dump(f"{name}.untouched", untouched)
        (y.square().sum() if local else y.square().sum().full_tensor()).backward()
        oracle.dump_grad(f"{name}.grad.x", x)
        for source, target in ((Partial(), Replicate()), (Partial(), Shard(1))):
            one = One()
            parallelize_module(
                one,
                mesh,
                PrepareModuleOutput(
                    output_layouts=source, desired_output_layouts=target, use_local_output=local
                ),
            )
            key = f"{name}.partial_to_{target}"
            x = oracle.local(f"{key}.x", (3, 8), ("tp",), requires_grad=True)
            y = one(x)
            oracle.dump(f"{key}.y", y)
            (y.square().sum() if local else y.square().sum().full_tensor()).backward()
            oracle.dump_grad(f"{key}.grad.x", x)
