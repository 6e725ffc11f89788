"""local_map with Partial outputs, collectives inside, and in_grad_placements."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("tp",))
    w = oracle.sharded("w", (5, 8), mesh, [Shard(1)], requires_grad=True)
    x = oracle.sharded("x", (8, 3), mesh, [Shard(0)], requires_grad=True)

    partial = local_map(
        torch.mm, out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)])
    )(w, x)
    oracle.dump("partial", partial)
    reduced = partial.redistribute(placements=[Replicate()])
    oracle.dump("reduced", reduced)

    def mm_all_reduce(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(torch.mm(w, x), "sum", mesh)

    with torch.no_grad():
        whole = local_map(
            mm_all_reduce,
            out_placements=[Replicate()],
            in_placements=([Shard(1)], [Shard(0)]),
            device_mesh=mesh,
        )(w, x)
    oracle.dump("whole", whole)

    # A replicated input, of which each device uses its own part: its gradient is Partial.
    scale = oracle.sharded("scale", (5,), mesh, [Replicate()], requires_grad=True)
    index = oracle.axis_index("tp")

    def scaled(part: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return part * scale[:, None] * (index + 1)

    product = local_map(
        scaled,
        out_placements=[Shard(1)],
        in_placements=([Shard(1)], [Replicate()]),
        in_grad_placements=([Shard(1)], [Partial()]),
    )(w, scale)
    oracle.dump("product", product)
    (product.sin().sum().full_tensor() + reduced.square().sum().to_local()).backward()
    for name, leaf in (("w", w), ("x", x), ("scale", scale)):
        oracle.dump_grad(f"grad.{name}", leaf)
