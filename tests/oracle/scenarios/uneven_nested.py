"""Dims that two mesh dims cut and that don't divide: each rank has what torch's second cut of its
part of the first one gives."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2), ("dp", "tp"))
    both = [Shard(0), Shard(0)]
    for rows in (1, 5, 9):
        x = oracle.sharded(f"x{rows}", (rows, 6), mesh, both, requires_grad=True)
        oracle.dump(f"{rows}.x", x)
        oracle.dump(f"{rows}.sin", x.sin())
        wide = oracle.sharded(f"wide{rows}", (3, rows), mesh, [Shard(1), Shard(1)])
        oracle.dump(f"{rows}.wide", wide * 2)
        moved = x.redistribute(placements=[Shard(0), Replicate()])
        oracle.dump(f"{rows}.moved", moved)
        back = moved.redistribute(placements=both)
        oracle.dump(f"{rows}.back", back)
        x.sin().sum().backward()
        oracle.dump_grad(f"{rows}.grad", x)
