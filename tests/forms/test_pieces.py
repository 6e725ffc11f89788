"""What each device has of a dim that several mesh dims cut, divisible or not, as torch cuts it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.conftest import make_mesh

S, R = Shard(0), Replicate()


def strided(split_factor: int) -> _StridedShard:
    return _StridedShard(0, split_factor=split_factor)


@pytest.mark.parametrize(
    "name,placements",
    [
        ("4x2", (S, S)),
        ("2x4", (S, S)),
        ("2x2x2", (S, S, S)),
        ("2x2x2", (S, R, S)),
        ("8", (S,)),
    ],
)
def test_pieces_are_torchs(name: str, placements: tuple[Placement, ...]) -> None:
    mesh = make_mesh(name)
    for size in (0, 1, 3, 7, 8, 9, 17, 18, 25, 33):
        value = torch.arange(size)
        for shard in distribute_tensor(value, mesh, placements).local_shards:
            (at,) = (mesh.mesh == shard.device).nonzero().tolist()
            (wanted,), (start,) = _compute_local_shape_and_global_offset(
                (size,), tuple(mesh.shape), at, placements
            )
            assert shard.data.tolist() == value[start : start + wanted].tolist()
            assert torch.equal(shard.data, value[shard.index])


@pytest.mark.parametrize(
    "name,placements,order",
    [
        ("4x2", (strided(2), S), (1, 0)),
        ("2x4", (strided(4), S), (1, 0)),
        ("2x2x2", (strided(4), strided(2), S), (2, 1, 0)),
        ("2x2x2", (S, strided(2), S), (0, 2, 1)),
    ],
)
def test_strided_pieces_are_what_fully_shard_leaves(
    name: str, placements: tuple[Placement, ...], order: tuple[int, ...]
) -> None:
    """Cut by tensor parallelism first, and the result by data parallelism. (What torch computes
    from the placements, without cutting anything, differs where that is uneven.)"""
    mesh = make_mesh(name)
    for size in (1, 9, 17, 18, 33):
        value = torch.arange(size)
        for shard in distribute_tensor(value, mesh, placements).local_shards:
            (at,) = (mesh.mesh == shard.device).nonzero().tolist()
            part = value
            for mesh_dim in order:
                parts = part.chunk(mesh.shape[mesh_dim])
                part = parts[at[mesh_dim]] if at[mesh_dim] < len(parts) else part[:0]
            assert shard.data.tolist() == part.tolist()
