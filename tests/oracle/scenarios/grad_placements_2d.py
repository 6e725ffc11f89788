"""``grad_placements`` on a (2, 2) mesh, mixed kinds, and on a submesh."""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2), ("dp", "tp"))
    for key, grads, vary in (
        ("dp", [Partial(), Replicate()], ("dp",)),
        ("tp", [Replicate(), Partial()], ("tp",)),
        ("both", [Partial(), Partial()], ("dp", "tp")),
        ("neither", [Replicate(), Replicate()], ()),
    ):
        x = oracle.sharded(key, (4, 4), mesh, [Replicate(), Replicate()], requires_grad=True)
        local = x.to_local(grad_placements=grads)
        (local.sin() * oracle.local(f"{key}.w", (4, 4), vary)).sum().backward()
        oracle.dump_grad(f"{key}.grad", x)
    x = oracle.sharded("mixed", (4, 4), mesh, [Shard(0), Replicate()], requires_grad=True)
    local = x.to_local(grad_placements=[Shard(0), Partial()])
    oracle.dump("mixed.local", local)
    (local.sin() * oracle.local("mixed.w", (2, 4), ("dp", "tp"))).sum().backward()
    oracle.dump_grad("mixed.grad", x)
    # A parameter on the tp submesh, used by each dp row on its own data.
    x = oracle.sharded("sub", (4, 4), mesh["tp"], [Replicate()], requires_grad=True)
    local = x.to_local(grad_placements=[Partial()])
    (local * oracle.local("sub.w", (4, 4), ("dp", "tp"))).sum().backward()
    oracle.dump_grad("sub.grad", x)
    data = oracle.local("data", (3, 4), ("dp",), requires_grad=True)
    weight = oracle.sharded("weight", (4, 4), mesh["tp"], [Shard(1)], requires_grad=True)
    y = DTensor.from_local(data, mesh["tp"], [Replicate()]) @ weight
    oracle.dump("sub.y", y)
    y.sin().sum().full_tensor().backward()
    oracle.dump_grad("sub.grad.weight", weight)
    oracle.dump_grad("sub.grad.data", data)
