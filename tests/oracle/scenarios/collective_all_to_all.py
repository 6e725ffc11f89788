"""all_to_all_single with even splits, given or not."""

from __future__ import annotations

import torch.distributed._functional_collectives as funcol

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("x",))
    x = oracle.local("x", (8, 3), ("x",))
    y = funcol.all_to_all_single(x, None, None, mesh)
    oracle.dump("y", y)
    oracle.dump("given", funcol.all_to_all_single(x, [2] * 4, [2] * 4, mesh))
    oracle.dump("back", funcol.all_to_all_single(y, None, None, mesh))
    # Ulysses: sequence-sharded [sequence, head] to head-sharded.
    heads = oracle.local("heads", (2, 4, 3), ("x",))
    sent = heads.transpose(0, 1).contiguous()
    received = funcol.all_to_all_single(sent, None, None, mesh)
    oracle.dump("ulysses", received.reshape(8, 3))
