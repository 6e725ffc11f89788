"""The coalesced collectives: several tensors of different shapes in one call."""

from __future__ import annotations

import torch.distributed._functional_collectives as funcol

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("x",))
    shapes = ((4, 2), (8,), (4, 4, 3))
    tensors = [oracle.local(f"t{i}", shape, ("x",)) for i, shape in enumerate(shapes)]
    for op in ("sum", "max"):
        for i, y in enumerate(funcol.all_reduce_coalesced(tensors, op, mesh)):
            oracle.dump(f"reduce.{op}.{i}", y)
    for i, y in enumerate(funcol.all_gather_into_tensor_coalesced(tensors, mesh)):
        oracle.dump(f"gather.{i}", y)
    scattered = funcol.reduce_scatter_tensor_coalesced(list(tensors), "sum", [0, 0, 1], mesh)
    for i, y in enumerate(scattered):
        oracle.dump(f"scatter.{i}", y)
    leaves = [
        oracle.local(f"leaf{i}", shape, ("x",), requires_grad=True)
        for i, shape in enumerate(shapes)
    ]
    loss = sum(
        (y * y).sum()
        for ys in (
            funcol.all_reduce_coalesced(leaves, "sum", mesh),
            funcol.all_gather_into_tensor_coalesced(leaves, mesh),
            funcol.reduce_scatter_tensor_coalesced(list(leaves), "sum", [0, 0, 0], mesh),
        )
        for y in ys
    )
    loss.backward()
    for i, leaf in enumerate(leaves):
        oracle.dump_grad(f"grad.{i}", leaf)
