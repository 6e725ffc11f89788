"""Unevenly sharded tensors: elementwise, matmul, reductions, redistributions; and what a program
may still do with them in the local view (make them whole first)."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("x",))
    for rows in (3, 5, 7):
        x = oracle.sharded(f"x{rows}", (rows, 6), mesh, [Shard(0)], requires_grad=True)
        w = oracle.sharded(f"w{rows}", (6, 5), mesh, [Shard(1)], requires_grad=True)
        oracle.dump(f"{rows}.x", x)
        oracle.dump(f"{rows}.sin", x.sin())
        y = x.redistribute(placements=[Replicate()]) @ w
        oracle.dump(f"{rows}.y", y)
        oracle.dump(f"{rows}.sum", x.sum(0))
        moved = y.redistribute(placements=[Shard(0)])
        oracle.dump(f"{rows}.moved", moved)
        local = moved.redistribute(placements=[Replicate()]).to_local()
        oracle.dump(f"{rows}.local", local)
        local.square().sum().backward()
        oracle.dump_grad(f"{rows}.grad.x", x)
        oracle.dump_grad(f"{rows}.grad.w", w)
