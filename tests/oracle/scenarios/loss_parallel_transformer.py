"""A tensor-parallel transformer whose logits stay sharded into loss_parallel."""

from __future__ import annotations

import torch
from torch.distributed.tensor.parallel import loss_parallel

from tests.oracle._harness import Oracle
from tests.oracle.scenarios._transformer import (
    VOCABULARY,
    Transformer,
    cross_entropy,
    tensor_parallel,
)

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("tp",))
    model = oracle.module(Transformer)
    tensor_parallel(model, mesh, loss_parallel=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = oracle.local("tokens", (2, 8), dtype=torch.int64, high=VOCABULARY)
    with loss_parallel():
        logits = model(tokens)
        oracle.dump("logits", logits)
        loss = cross_entropy(logits, tokens)
        oracle.dump("loss", loss)
        loss.backward()
    oracle.dump_step("step", model, optimizer)
