"""loss_parallel: cross entropy over vocabulary-sharded logits, each reduction, ignored targets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("tp",))
    for reduction in ("mean", "sum", "none"):
        logits = oracle.sharded(f"{reduction}.x", (6, 8), mesh, [Shard(1)], requires_grad=True)
        target = oracle.local(f"{reduction}.target", (6,), dtype=torch.int64, high=8)
        with loss_parallel():
            loss = F.cross_entropy(logits, target, reduction=reduction, ignore_index=3)
            oracle.dump(f"{reduction}.loss", loss)
            (loss if reduction != "none" else loss.sum()).backward()
        oracle.dump_grad(f"{reduction}.grad", logits)
    # Three dims, from local logits, with class weights.
    local = oracle.local("local", (2, 2, 5), ("tp",), requires_grad=True)
    weight = distribute_tensor(oracle.full("weight", (8,)).abs(), mesh)
    target = oracle.local("target", (2, 5), dtype=torch.int64, high=8)
    with loss_parallel():
        logits = DTensor.from_local(local, mesh, [Shard(1)])
        loss = F.cross_entropy(logits, target, weight=weight)
        oracle.dump("loss", loss)
        loss.backward()
    oracle.dump_grad("grad", local)
