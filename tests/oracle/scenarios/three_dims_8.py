"""Local tensors and DTensors on a (2, 2, 2) mesh: submeshes of one and two dims, in sequence."""

from __future__ import annotations

import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.oracle._harness import Oracle

WORLD_SIZE = 8


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2, 2), ("a", "b", "c"))
    x = oracle.local("x", (4, 2), ("a", "b", "c"), requires_grad=True)
    y = DTensor.from_local(x, mesh["a", "c"], [Partial(), Shard(1)])
    oracle.dump("y", y)
    y = y.redistribute(placements=[Shard(0), Replicate()]).sin()
    oracle.dump("y.moved", y)
    local = y.to_local()
    z = funcol.all_gather_tensor_autograd(local, 0, mesh["b"])
    oracle.dump("z", z)
    w = oracle.sharded("w", (4, 6), mesh["c"], [Shard(1)], requires_grad=True)
    product = DTensor.from_local(z, mesh["c"], [Replicate()]) @ w
    oracle.dump("product", product)
    total = (product.to_local() * oracle.local("weight", (4, 3), ("a", "b", "c"))).sum()
    oracle.dump("total", funcol.all_reduce(total.detach(), "sum", mesh["a", "b"]._flatten("ab")))
    total.backward()
    oracle.dump_grad("grad.x", x)
    oracle.dump_grad("grad.w", w)
