"""Reads at positions along several dims: the rows for the columns, in every layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

READS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "last": lambda x, i, j: x[:, i, j],
    "middle": lambda x, i, j: x[:, i, j, None].expand(-1, -1, 8),
    "first": lambda x, i, j: x[i, j],
    "apart": lambda x, i, j: x[i, :, j],
    "outer": lambda x, i, j: x[:, i[:, None], j],
    "a_diagonal": lambda x, i, j: x.diagonal(1, 1, 2),
    "a_determinant": lambda x, i, j: (x + 40 * torch.eye(8, device=x.device)).slogdet()[1][:, None],
}
BEFORE = [[Shard(1), Replicate()], [Shard(2), Shard(0)], [Replicate(), Shard(2)]]
AFTER = [[Shard(0), Shard(1)], [Shard(0), Replicate()], [Shard(1), Shard(0)]]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("after", AFTER, ids=str)
@pytest.mark.parametrize("before", BEFORE, ids=str)
@pytest.mark.parametrize("name", READS)
def test_reads(mesh_2x4: DeviceMesh, name: str, before: list, after: list) -> None:
    read = READS[name]
    numbers = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(1))
    i, j = torch.tensor([3, 0, 7, 1, 6, 6, 2, 5]), torch.tensor([0, 7, 2, 2, 4, 5, 1, 6])
    x = distribute_tensor(numbers, mesh_2x4, before)
    at = [distribute_tensor(each, mesh_2x4, [Replicate(), Shard(0)]) for each in (i, j)]

    @xd.compile
    def step(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return read(x, i, j).redistribute(placements=after)

    torch.testing.assert_close(step(x, *at).full_tensor().cpu(), read(numbers, i, j))
