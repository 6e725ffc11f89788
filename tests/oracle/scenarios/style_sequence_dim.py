"""SequenceParallel along dim 0, and of a module that has no parameters (dropout in eval mode)."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("tp",))
    model = oracle.module(lambda: nn.Sequential(nn.LayerNorm(6), nn.Dropout(0.5))).eval()
    parallelize_module(
        model,
        mesh,
        {
            "0": SequenceParallel(sequence_dim=0),
            "1": SequenceParallel(sequence_dim=0, use_local_output=True),
        },
    )
    x = oracle.local("x", (3, 2, 6), ("tp",), requires_grad=True)
    y = model(x)
    oracle.dump("y", y)
    y.square().mean().backward()
    oracle.dump_grad("grad.x", x)
    oracle.dump_grad("grad.weight", model[0].weight)
    oracle.dump_grad("grad.bias", model[0].bias)
