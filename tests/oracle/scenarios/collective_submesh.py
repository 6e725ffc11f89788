"""Collectives over one dim of a (2, 2) mesh, as a submesh and as (mesh, dim), and over both."""

from __future__ import annotations

import torch.distributed._functional_collectives as funcol

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2), ("a", "b"))
    groups = {
        "a": mesh["a"],
        "b": mesh["b"],
        "dim0": (mesh, 0),
        "dim1": (mesh, 1),
        "both": mesh._flatten("ab"),
    }
    for vary in (("a", "b"), ("a",), ("b",), ()):
        x = oracle.local(f"x{vary}", (4, 2), vary)
        for key, group in groups.items():
            name = f"{'+'.join(vary) or 'none'}.{key}"
            oracle.dump(f"{name}.sum", funcol.all_reduce(x, "sum", group))
            oracle.dump(f"{name}.max", funcol.all_reduce(x, "max", group))
            oracle.dump(f"{name}.gather", funcol.all_gather_tensor(x, 0, group))
            oracle.dump(f"{name}.scatter", funcol.reduce_scatter_tensor(x, "sum", 0, group))
            oracle.dump(f"{name}.exchange", funcol.all_to_all_single(x, None, None, group))
            # The source is a position in the group.
            oracle.dump(f"{name}.broadcast", funcol.broadcast(x, 1, group))
            size = 4 if key == "both" else 2
            ring = [(i + 1) % size for i in range(size)]
            oracle.dump(f"{name}.permute", funcol.permute_tensor(x[:, 0], ring, group))
