"""broadcast from each rank, and permute_tensor by rings and swaps (of one-dim tensors: torch's
permute_tensor splits by the number of elements along dim 0)."""

from __future__ import annotations

import torch.distributed._functional_collectives as funcol

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("x",))
    x = oracle.local("x", (2, 3), ("x",))
    for source in range(4):
        oracle.dump(f"broadcast{source}", funcol.broadcast(x, source, mesh))
    flat = oracle.local("flat", (5,), ("x",))
    for order in ([1, 2, 3, 0], [3, 0, 1, 2], [1, 0, 3, 2], [0, 1, 2, 3], [2, 0, 3, 1]):
        key = "".join(map(str, order))
        oracle.dump(f"permute.{key}", funcol.permute_tensor(flat, order, mesh))
