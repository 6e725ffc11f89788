"""PrepareModuleInput: positional and keyword inputs, one left alone, both kinds of output."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


class Inner(nn.Module):
    """Dumps what arrives."""

    def __init__(self, oracle: Oracle, name: str) -> None:
        super().__init__()
        self.oracle, self.name = oracle, name

    def forward(self, a: torch.Tensor, b: torch.Tensor, *, c: torch.Tensor) -> torch.Tensor:
        for key, value in (("a", a), ("b", b), ("c", c)):
            self.oracle.dump(f"{self.name}.inner.{key}", value)
        if isinstance(a, DTensor):
            assert isinstance(c, DTensor)
            return (a.sin() + c).sum().full_tensor() + b.square().sum()
        return (a.sin() + c).sum() + b.square().sum()


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("tp",))
    for local in (False, True):
        name = "local" if local else "dtensor"
        module = Inner(oracle, name)
        style = PrepareModuleInput(
            input_layouts=(Shard(0), None),
            desired_input_layouts=(Replicate(), None),
            input_kwarg_layouts={"c": Shard(1)},
            desired_input_kwarg_layouts={"c": Replicate()},
            use_local_output=local,
        )
        parallelize_module(module, mesh, style)
        a = oracle.local(f"{name}.a", (2, 4), ("tp",), requires_grad=True)
        b = oracle.local(f"{name}.b", (3,), ("tp",), requires_grad=True)
        c = oracle.local(f"{name}.c", (8, 1), ("tp",), requires_grad=True)
        loss = module(a, b, c=c)
        oracle.dump(f"{name}.loss", loss)
        loss.backward()
        for key, leaf in (("a", a), ("b", b), ("c", c)):
            oracle.dump_grad(f"{name}.grad.{key}", leaf)
