"""Sequence-sharded causal attention on local tensors: keys and values gathered, masks by the
device's coordinate; and the same by a ring of permutations, without gradients."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol

from tests.oracle._harness import Oracle

WORLD_SIZE = 4

OWN, DIM = 2, 4  # positions per device, head dim


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("cp",))
    rank = oracle.axis_index("cp")
    q, k, v = (oracle.local(n, (OWN, DIM), ("cp",), requires_grad=True) for n in "qkv")
    keys = funcol.all_gather_tensor_autograd(k, 0, mesh)
    values = funcol.all_gather_tensor_autograd(v, 0, mesh)
    position = rank * OWN + torch.arange(OWN, device=q.device)
    visible = torch.arange(4 * OWN, device=q.device)[None, :] <= position[:, None]
    oracle.dump("visible", visible)
    scores = (q @ keys.t()).masked_fill(~visible, float("-inf"))
    out = scores.softmax(-1) @ values
    oracle.dump("out", out)
    (out * oracle.local("w", (OWN, DIM), ("cp",))).sum().backward()
    for name, leaf in (("q", q), ("k", k), ("v", v)):
        oracle.dump_grad(f"grad.{name}", leaf)

    with torch.no_grad():
        total = torch.zeros(OWN, DIM, device=q.device)
        normalizer = torch.zeros(OWN, 1, device=q.device)
        source = rank
        block = torch.cat([k, v]).flatten()
        for step in range(4):
            kk, vv = block.reshape(2, OWN, DIM)
            at = source * OWN + torch.arange(OWN, device=q.device)
            weight = (q @ kk.t()).exp() * (at[None, :] <= position[:, None])
            total += weight @ vv
            normalizer += weight.sum(-1, keepdim=True)
            oracle.dump(f"ring{step}", total / normalizer.clamp(min=1e-6))
            block = funcol.permute_tensor(block, [1, 2, 3, 0], mesh)
            source = (source - 1) % 4
        oracle.dump("ring", total / normalizer)
