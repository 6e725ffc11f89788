"""SequenceParallel on LayerNorm and RMSNorm: both kinds of output, local and DTensor input."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("tp",))
    for kind in (nn.LayerNorm, nn.RMSNorm):
        for local in (True, False):
            name = f"{kind.__name__}.{'local' if local else 'dtensor'}"
            norm = oracle.module(lambda kind=kind: kind(6))
            parallelize_module(norm, mesh, SequenceParallel(use_local_output=local))
            if local:
                x = oracle.local(f"{name}.x", (2, 3, 6), ("tp",), requires_grad=True)
                y = norm(x)
                loss = (y * y.sin()).sum()
            else:
                x = oracle.local(f"{name}.x", (2, 8, 6), requires_grad=True)
                y = norm(DTensor.from_local(x, mesh, [Replicate()]))
                loss = (y * y.sin()).sum().full_tensor()
            oracle.dump(f"{name}.y", y)
            loss.backward()
            oracle.dump_grad(f"{name}.grad.x", x)
            oracle.dump_step(name, norm, torch.optim.SGD(norm.parameters(), lr=0.1))
