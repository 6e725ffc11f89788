"""all_reduce with every operation, on floats and integers (bitwise ones too)."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("x",))
    for op in ("sum", "avg", "product", "min", "max", "SUM"):
        x = oracle.local(f"{op}.x", (3, 2), ("x",))
        y = funcol.all_reduce(x, op, mesh)
        oracle.dump(f"{op}.y", y)
        oracle.dump(f"{op}.x", x)  # unchanged
        oracle.dump(f"{op}.next", y * x)
    for op in ("sum", "product", "min", "max", "band", "bor", "bxor"):
        x = oracle.local(f"int.{op}.x", (5,), ("x",), dtype=torch.int64, high=30)
        oracle.dump(f"int.{op}.y", funcol.all_reduce(x, op, mesh))
    x = oracle.local("replicated", (3,))
    oracle.dump("replicated.sum", funcol.all_reduce(x, "sum", mesh))
    oracle.dump("replicated.max", funcol.all_reduce(x, "max", mesh))
    scalar = oracle.local("scalar", (), ("x",))
    oracle.dump("scalar.sum", funcol.all_reduce(scalar, "sum", mesh))
