"""A transformer with tensor and sequence parallelism, two steps."""

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
    mesh = oracle.mesh((4,), ("tp",))
    model = oracle.module(lambda: Transformer(layers=2))
    tensor_parallel(model, mesh)
    for index, layer in enumerate(model.layers):
        layer.register_forward_hook(
            lambda m, i, y, index=index: oracle.dump(f"step{step}.layer{index}", y)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        tokens = oracle.local(f"tokens{step}", (2, 8), dtype=torch.int64, high=VOCABULARY)
        logits = model(tokens)
        oracle.dump(f"step{step}.logits", logits)
        loss = cross_entropy(logits, tokens)
        oracle.dump(f"step{step}.loss", loss)
        loss.backward()
        oracle.dump_step(f"step{step}", model, optimizer)
