"""Colwise- and RowwiseParallel on an embedding; the rowwise one masks what other devices hold."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from tests.oracle._harness import Oracle

WORLD_SIZE = 4

STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_whole": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_sequence": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "rowwise_dtensor": RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    ),
}


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("tp",))
    for name, style in STYLES.items():
        embedding = oracle.module(lambda: nn.Embedding(16, 8))
        parallelize_module(embedding, mesh, style)
        tokens = oracle.local(f"{name}.tokens", (2, 4), dtype=torch.int64, high=16)
        y = embedding(tokens)
        oracle.dump(f"{name}.y", y)
        loss = y.sin().sum()
        if name.endswith("dtensor"):
            loss = loss.full_tensor()
        loss.backward()
        oracle.dump_step(name, embedding, torch.optim.SGD(embedding.parameters(), lr=0.1))
