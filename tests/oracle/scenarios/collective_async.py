"""Collectives that are waited for late, explicitly or by the first use, or chained unwaited."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Replicate, Shard

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("x",))
    x = oracle.local("x", (4, 3), ("x",))
    started = funcol.all_reduce(x, "sum", mesh)
    meanwhile = x.sin()
    waited = funcol.wait_tensor(started)
    oracle.dump("waited", waited + meanwhile)
    oracle.dump("waited.twice", funcol.wait_tensor(started))

    first = funcol.all_gather_tensor(x, 0, mesh)
    second = funcol.reduce_scatter_tensor(first, "sum", 0, mesh)
    oracle.dump("chained", second)
    oracle.dump("view", funcol.all_reduce(x, "sum", mesh).t()[1:])
    oracle.dump("cat", torch.cat([funcol.all_reduce(x, op, mesh) for op in ("sum", "max")]))

    # A result may be written to; the input is another tensor.
    written = funcol.wait_tensor(funcol.all_reduce(x, "sum", mesh))
    written.mul_(2).add_(x)
    oracle.dump("written", written)
    oracle.dump("x", x)

    tensor = oracle.sharded("y", (8, 4), mesh, [Shard(0)], requires_grad=True)
    gathered = tensor.redistribute(placements=[Replicate()], async_op=True)
    local = gathered.to_local()
    oracle.dump("gathered", funcol.wait_tensor(local))
    exchanged = tensor.redistribute(placements=[Shard(1)], async_op=True)
    oracle.dump("exchanged", exchanged)
    exchanged.square().sum().full_tensor().backward()
    oracle.dump_grad("grad", tensor)
