"""from_local and to_local on a (2, 2) mesh: every pair of placements, whole mesh and submeshes."""

from __future__ import annotations

import itertools

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2), ("a", "b"))
    for placements in itertools.product((Shard(0), Shard(1), Replicate(), Partial()), repeat=2):
        name = str(placements)
        vary = [d for d, p in zip(("a", "b"), placements, strict=True) if not p.is_replicate()]
        x = oracle.local(f"{name}.x", (2, 4), vary, requires_grad=True)
        y = DTensor.from_local(x, mesh, placements)
        oracle.dump(f"{name}.y", y, strides=True)
        z = y.redistribute(placements=[Shard(1), Shard(0)])
        oracle.dump(f"{name}.z", z)
        local = z.to_local()
        oracle.dump(f"{name}.local", local)
        (local.sin() * oracle.local(f"{name}.w", tuple(local.shape), ("a", "b"))).sum().backward()
        oracle.dump_grad(f"{name}.grad", x)
    # On a submesh, the other dim's devices hold tensors of their own.
    for dim, other in (("a", "b"), ("b", "a")):
        for placement in (Shard(0), Shard(1), Partial()):
            name = f"{dim}.{placement}"
            x = oracle.local(f"{name}.x", (2, 4), ("a", "b"), requires_grad=True)
            y = DTensor.from_local(x, mesh[dim], [placement])
            oracle.dump(f"{name}.y", y)
            z = y.redistribute(placements=[Replicate()])
            oracle.dump(f"{name}.z", z)
            full = z.sin().to_local(grad_placements=[Replicate()])
            oracle.dump(f"{name}.full", full)
            (full * oracle.local(f"{name}.w", tuple(full.shape), (other,))).sum().backward()
            oracle.dump_grad(f"{name}.grad", x)
