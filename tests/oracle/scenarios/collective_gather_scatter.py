"""all_gather_tensor and reduce_scatter_tensor along each dim, with every operation."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("x",))
    x = oracle.local("x", (2, 3, 4), ("x",))
    for dim in (0, 1, 2):
        oracle.dump(f"gather{dim}", funcol.all_gather_tensor(x, dim, mesh))
    index = oracle.local("index", (3,), ("x",), dtype=torch.int64, high=9)
    oracle.dump("gather.int", funcol.all_gather_tensor(index, 0, mesh))
    oracle.dump("gather.transposed", funcol.all_gather_tensor(x.transpose(0, 2), 0, mesh))
    replicated = oracle.local("replicated", (2,))
    oracle.dump("gather.replicated", funcol.all_gather_tensor(replicated, 0, mesh))

    x = oracle.local("y", (8, 4), ("x",))
    for dim in (0, 1):
        for op in ("sum", "avg", "min", "max", "product"):
            oracle.dump(f"scatter{dim}.{op}", funcol.reduce_scatter_tensor(x, op, dim, mesh))
    ints = oracle.local("ints", (8,), ("x",), dtype=torch.int64, high=9)
    oracle.dump("scatter.int", funcol.reduce_scatter_tensor(ints, "sum", 0, mesh))
    same = oracle.local("same", (8,))
    oracle.dump("scatter.replicated", funcol.reduce_scatter_tensor(same, "sum", 0, mesh))
