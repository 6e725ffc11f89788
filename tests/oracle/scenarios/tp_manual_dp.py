"""Tensor parallelism on ``mesh["tp"]`` of a (dp, tp) mesh, each dp row with its own batch.

The gradients are averaged over dp by hand; before that, they differ along dp: what a DTensor on a
submesh may do."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor

from tests.oracle._harness import Oracle
from tests.oracle.scenarios._transformer import (
    VOCABULARY,
    Transformer,
    cross_entropy,
    tensor_parallel,
)

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2), ("dp", "tp"))
    model = oracle.module(Transformer)
    tensor_parallel(model, mesh["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        tokens = oracle.local(f"tokens{step}", (2, 8), ("dp",), dtype=torch.int64, high=VOCABULARY)
        logits = model(tokens)
        loss = cross_entropy(logits, tokens)
        oracle.dump(f"step{step}.loss", loss)
        loss.backward()
        for name, parameter in model.named_parameters():
            oracle.dump_grad(f"step{step}.own.{name}", parameter)
            assert isinstance(parameter.grad, DTensor)
            grad = parameter.grad.redistribute(placements=parameter.placements)
            mean = funcol.all_reduce(grad.to_local(), "avg", (mesh, 0))
            parameter.grad = DTensor.from_local(mean, mesh["tp"], parameter.placements)
        oracle.dump_step(f"step{step}", model, optimizer)
