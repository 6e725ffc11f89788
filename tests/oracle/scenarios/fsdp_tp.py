"""fully_shard over dp of a tensor-parallel transformer: parameters sharded on both mesh dims."""

from __future__ import annotations

import torch

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
    model = oracle.module(lambda: Transformer(layers=2))
    tensor_parallel(model, mesh["tp"])
    for layer in model.layers:
        oracle.fully_shard(layer, mesh=mesh["dp"])
    oracle.fully_shard(model, mesh=mesh["dp"])
    for key, parameter in model.named_parameters():
        oracle.dump(f"initial.{key}", parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        tokens = oracle.local(f"tokens{step}", (2, 8), ("dp",), dtype=torch.int64, high=VOCABULARY)
        logits = model(tokens)
        oracle.dump(f"step{step}.logits", logits)
        loss = cross_entropy(logits, tokens)
        oracle.dump(f"step{step}.loss", loss)
        loss.backward()
        oracle.dump_step(f"step{step}", model, optimizer)
