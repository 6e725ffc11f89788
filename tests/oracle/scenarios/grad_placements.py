"""``grad_placements`` of to_local, full_tensor and from_local, against the defaults."""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("x",))
    weight = oracle.local("weight", (8, 4), ("x",))
    same = oracle.local("same", (8, 4))

    # Replicated, then used differently on each device: the gradient is a sum.
    x = oracle.sharded("x", (8, 4), mesh, [Replicate()], requires_grad=True)
    (x.to_local(grad_placements=[Partial()]) * weight).sum().backward()
    oracle.dump_grad("to_local.partial", x)
    # Used in the same way on each: the default.
    x = oracle.sharded("x", (8, 4), mesh, [Replicate()], requires_grad=True)
    (x.to_local() * same).sum().backward()
    oracle.dump_grad("to_local.default", x)
    # The same use, said to be partial: counted once per device.
    x = oracle.sharded("x", (8, 4), mesh, [Replicate()], requires_grad=True)
    (x.to_local(grad_placements=[Partial()]) * same).sum().backward()
    oracle.dump_grad("to_local.counted", x)
    # Through a redistribution and a non-leaf.
    x = oracle.sharded("x", (8, 4), mesh, [Shard(0)], requires_grad=True)
    y = x.sin().redistribute(placements=[Replicate()])
    (y.to_local(grad_placements=[Partial()]) * weight).sum().backward()
    oracle.dump_grad("redistributed", x)
    for key, placements in (("partial", [Partial()]), ("default", None)):
        x = oracle.sharded("x", (8, 4), mesh, [Shard(1)], requires_grad=True)
        factor = weight if placements else same
        (x.full_tensor(grad_placements=placements) * factor).sum().backward()
        oracle.dump_grad(f"full_tensor.{key}", x)

    # from_local: the layout in which the gradient arrives at the local leaf.
    for key, placements in (
        ("default", None),
        ("replicate", [Replicate()]),
    ):
        local = oracle.local("local", (8, 4), ("x",), requires_grad=True)
        y = DTensor.from_local(local, mesh, [Partial()], grad_placements=placements)
        y.sin().sum().full_tensor().backward()
        oracle.dump_grad(f"from_local.{key}", local)
    local = oracle.local("local2", (8, 4), requires_grad=True)
    y = DTensor.from_local(local, mesh, [Replicate()], grad_placements=[Partial()])
    weight = oracle.sharded("z", (4, 8), mesh, [Shard(1)])
    (y @ weight).sin().sum().full_tensor().backward()
    # Each device has its own columns' part of it: the sum is defined.
    oracle.dump("from_local.partial", local.grad, pending=("sum", ("x",)))
