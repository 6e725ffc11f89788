"""A vocabulary-parallel embedding and cross entropy, by hand on local tensors, in Megatron's way:
each device masks by its own coordinate and the collectives join the parts."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol

from tests.oracle._harness import Oracle

WORLD_SIZE = 4

VOCABULARY, DIM = 16, 6


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("tp",))
    own = VOCABULARY // 4
    first = oracle.axis_index("tp") * own
    table = oracle.local("table", (own, DIM), ("tp",), requires_grad=True)
    head = oracle.local("head", (own, DIM), ("tp",), requires_grad=True)
    tokens = oracle.local("tokens", (5,), dtype=torch.int64, high=VOCABULARY)

    index = tokens - first
    mine = (index >= 0) & (index < own)
    oracle.dump("mine", mine)
    index = index.clamp(0, own - 1)
    rows = torch.where(mine[:, None], table[index], 0.0)
    oracle.dump("rows", rows)
    # Each device uses the sum in its own way: its gradient is summed over the devices.
    h = funcol.all_reduce(rows, "sum", mesh)
    oracle.dump("h", h)

    logits = h @ head.t()
    oracle.dump("logits", logits)
    top = funcol.all_reduce(logits.detach().amax(-1), "max", mesh)
    normalizer = funcol.all_reduce((logits - top[:, None]).exp().sum(-1), "sum", mesh)
    picked = logits.gather(1, index[:, None])[:, 0] - top
    target = funcol.all_reduce(torch.where(mine, picked, 0.0), "sum", mesh)
    loss = (normalizer.log() - target).mean()
    oracle.dump("loss", loss)
    # all_reduce's gradient is an all_reduce: the loss of every device counts.
    (loss / 4).backward()
    oracle.dump_grad("grad.table", table)
    oracle.dump_grad("grad.head", head)
