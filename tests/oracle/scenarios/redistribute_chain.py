"""Redistributions between all pairs of layouts of a (2, 2) mesh, the gradient flowing back."""

from __future__ import annotations

import itertools

from torch.distributed.tensor import Replicate, Shard

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2), ("a", "b"))
    layouts = list(itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2))
    for source, target in itertools.product(layouts, repeat=2):
        name = f"{source}->{target}"
        x = oracle.sharded("x", (4, 8), mesh, source, requires_grad=True)
        y = x.redistribute(placements=target)
        oracle.dump(f"{name}.y", y)
        (y * y.sin()).sum().full_tensor().backward()
        oracle.dump_grad(f"{name}.grad", x)
