"""Dropout on sharded tensors: which elements go is random, everything else is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from tests.ops.harness import close

R = Replicate()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [(64, 32), (30, 13)])
def test_dropout_zeroes_and_scales(mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
    value = torch.rand(shape) + 1
    for placement in (R, Shard(0), Shard(1), Partial()):
        placements: list[Placement] = [placement] + [R] * (mesh.ndim - 1)
        x = distribute_tensor(value, mesh, placements).requires_grad_()
        y = F.dropout(x, 0.25)
        y.sum().backward()
        kept = y.detach().cpu() != 0
        assert 0.65 < kept.float().mean() < 0.85
        close(y.detach().cpu(), torch.where(kept, value / 0.75, 0.0))
        assert x.grad is not None
        close(x.grad.cpu(), kept / 0.75)  # the same mask


def test_dropout_depends_on_the_seed_and_not_on_the_layout(mesh: DeviceMesh) -> None:
    value = torch.ones(24, 10)
    results = []
    for placement in (R, Shard(0), Shard(1)):
        torch.manual_seed(3)
        x = distribute_tensor(value, mesh, [placement] + [R] * (mesh.ndim - 1))
        results.append((F.dropout(x, 0.5).cpu(), F.dropout(x, 0.5).cpu()))
    for first, second in results:
        close(first, results[0][0])
        close(second, results[0][1])
        assert not torch.equal(first, second)
