"""local_map over attention: heads sharded over tp, batch over dp, gradients through it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import local_map

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2), ("dp", "tp"))
    heads = [Shard(0), Shard(1)]

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        oracle.dump("inner.q", q)
        scores = q @ k.transpose(-1, -2)
        oracle.dump("inner.scores", scores)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out, scores.amax(-1)

    mapped = local_map(
        attention,
        out_placements=(heads, heads),
        in_placements=(heads, heads, heads, None),
        redistribute_inputs=True,
    )
    # [batch, head, sequence, head dim]; v arrives sharded along the sequence.
    q = oracle.sharded("q", (4, 2, 6, 4), mesh, heads, requires_grad=True)
    k = oracle.sharded("k", (4, 2, 6, 4), mesh, heads, requires_grad=True)
    v = oracle.sharded("v", (4, 2, 6, 4), mesh, [Shard(2), Shard(1)], requires_grad=True)
    out, top = mapped(q, k, v, 0.5)
    oracle.dump("out", out)
    oracle.dump("top", top)
    ((out * out).sum() + top.sum()).full_tensor().backward()
    for name, leaf in (("q", q), ("k", k), ("v", v)):
        oracle.dump_grad(f"grad.{name}", leaf)
