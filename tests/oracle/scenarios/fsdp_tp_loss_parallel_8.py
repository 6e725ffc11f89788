"""fully_shard x tensor parallel x loss_parallel on a (2, 4) mesh of eight devices."""

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

WORLD_SIZE = 8


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 4), ("dp", "tp"))
    model = oracle.module(Transformer)
    tensor_parallel(model, mesh["tp"], loss_parallel=True)
    for layer in model.layers:
        oracle.fully_shard(layer, mesh=mesh["dp"])
    oracle.fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        tokens = oracle.local(f"tokens{step}", (2, 8), ("dp",), dtype=torch.int64, high=VOCABULARY)
        with loss_parallel():
            logits = model(tokens)
            loss = cross_entropy(logits, tokens)
            oracle.dump(f"step{step}.loss", loss)
            loss.backward()
        oracle.dump_step(f"step{step}", model, optimizer)
