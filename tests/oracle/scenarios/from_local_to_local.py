"""from_local and to_local with each placement on one mesh dim, their strides and gradients."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("x",))
    for placement in (Shard(0), Shard(1), Shard(-1), Replicate()):
        for transposed in (False, True):
            name = f"{placement}.{'transposed' if transposed else 'plain'}"
            vary = () if placement.is_replicate() else ("x",)
            x = oracle.local(f"{name}.x", (2, 3, 4), vary, requires_grad=True)
            source = x.transpose(0, 2) if transposed else x
            y = DTensor.from_local(source, mesh, [placement])
            oracle.dump(f"{name}.y", y, strides=True)
            z = (y * 2).to_local()
            oracle.dump(f"{name}.z", z)
            (z * z).sum().backward()
            oracle.dump_grad(f"{name}.grad", x)
    # Default placements, and back with nothing in between.
    x = oracle.local("default", (2, 3), requires_grad=True)
    y = DTensor.from_local(x, mesh)
    oracle.dump("default.y", y, strides=True)
    oracle.dump("default.local", y.to_local())
    oracle.dump("default.full", y.full_tensor())
    # Shape and stride given.
    x = oracle.local("given", (2, 3), ("x",))
    y = DTensor.from_local(x, mesh, [Shard(0)], shape=torch.Size((8, 3)), stride=(3, 1))
    oracle.dump("given.y", y, strides=True)
