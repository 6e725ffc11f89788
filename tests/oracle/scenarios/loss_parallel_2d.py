"""loss_parallel on a (dp, tp) mesh: batch- and vocabulary-sharded logits; the sum is Partial."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2), ("dp", "tp"))
    for reduction in ("sum", "none"):
        logits = oracle.sharded(
            f"{reduction}.x", (6, 8), mesh, [Shard(0), Shard(1)], requires_grad=True
        )
        target = distribute_tensor(
            oracle.full(f"{reduction}.target", (6,), dtype=torch.int64, high=8),
            mesh,
            [Shard(0), Replicate()],
        )
        with loss_parallel():
            loss = F.cross_entropy(logits, target, reduction=reduction)
            oracle.dump(f"{reduction}.loss", loss)
            total = loss if reduction == "sum" else loss.square().sum()
            total.full_tensor().backward()
        oracle.dump_grad(f"{reduction}.grad", logits)
