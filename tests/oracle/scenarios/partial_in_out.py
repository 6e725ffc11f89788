"""Partial values of each reduction from local tensors: redistributed, used by ops, and back.

torch's gradient of ``from_local(..., [Partial("avg")])`` is that of the average, as it is for
``Partial("sum")``: not divided by the number of devices.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("x",))
    for op in ("sum", "avg", "max", "min"):
        local = oracle.local(f"{op}.x", (8, 4), ("x",))
        x = DTensor.from_local(local, mesh, [Partial(op)])
        oracle.dump(f"{op}.x", x)
        # Each device's part is what it gave.
        oracle.dump(f"{op}.local", x.to_local())
        oracle.dump(f"{op}.full", x.full_tensor())
        oracle.dump(f"{op}.replicated", x.redistribute(placements=[Replicate()]))
        oracle.dump(f"{op}.sharded", x.redistribute(placements=[Shard(1)]))
        oracle.dump(f"{op}.sin", x.sin())
        oracle.dump(f"{op}.mul", x * x)
    for op in ("sum", "avg"):
        local = oracle.local(f"{op}.y", (8, 4), ("x",), requires_grad=True)
        y = DTensor.from_local(local, mesh, [Partial(op)])
        # Linear operations may keep it unreduced.
        z = (y * 2 + y).transpose(0, 1)
        oracle.dump(f"{op}.z", z)
        oracle.dump(f"{op}.total", y.sum(0))
        w = oracle.sharded(f"{op}.w", (8, 3), mesh, [Replicate()], requires_grad=True)
        product = z @ w
        oracle.dump(f"{op}.product", product)
        part = product.redistribute(placements=[Shard(0)]).to_local()
        (part * oracle.local(f"{op}.weight", (1, 3), ("x",))).sum().backward()
        oracle.dump_grad(f"{op}.grad.y", local)
        oracle.dump_grad(f"{op}.grad.w", w)
    # A contraction over a sharded dim is Partial; what each device holds of it adds up.
    a = oracle.sharded("a", (4, 8), mesh, [Shard(1)])
    b = oracle.sharded("b", (8, 4), mesh, [Shard(0)])
    oracle.dump("contraction", a @ b)
    oracle.dump("contraction.local", (a @ b).to_local(), pending=("sum", ("x",)))
    oracle.dump("total.local", a.sum().to_local(), pending=("sum", ("x",)))
