from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from xla_dtensor.rules import DimSharding, TensorInfo
from xla_dtensor.rules.cost import redistribute_cost

R = Replicate()
MESH = (2, 4)


def strided(dim: int, factor: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=factor)


@pytest.mark.parametrize(
    ("placements", "dims_mapping"),
    [
        ((R, R), [-1, -1]),
        ((Shard(0), R), [0, -1]),
        ((Shard(1), Shard(0)), [1, 0]),
        ((Shard(0), Shard(0)), [[0, 1], -1]),
        ((strided(0, 4), Shard(0)), [[1, 0], -1]),
        ((Partial(), Shard(1)), [-1, 1]),
        ((strided(1, 3), R), [-1, 0]),
    ],
)
def test_dims_mapping_of_placements(placements, dims_mapping):
    sharding = DimSharding.from_placements(placements, 2, MESH)
    assert sharding.dims_mapping == dims_mapping
    assert sharding.placements(MESH) == placements


def test_a_factor_that_no_order_explains_is_kept_apart():
    sharding = DimSharding.from_placements((strided(0, 3), Shard(0)), 1, MESH)
    assert sharding.strided == ((0, 0, 3),)
    assert sharding.dims == ((1,),)


def test_every_order_of_three_mesh_dims_survives_placements():
    mesh = (2, 3, 5)
    for order in itertools.permutations(range(3)):
        sharding = DimSharding((order, ()))
        assert DimSharding.from_placements(sharding.placements(mesh), 2, mesh) == sharding


def test_dims_mapping_both_ways():
    sharding = DimSharding.from_dims_mapping([[1, 0], -1, 2], partial=[(3, "max")])
    assert sharding.dims == ((1, 0), (), (2,))
    assert sharding.dims_mapping == [[1, 0], -1, 2]
    assert sharding.placements((2, 4, 2, 2)) == (strided(0, 4), Shard(0), Shard(2), Partial("max"))


def test_a_mesh_dim_is_used_once():
    with pytest.raises(ValueError, match=r"mesh dims \[0\] are used more than once"):
        DimSharding.from_dims_mapping([0, 0])


def test_a_shard_of_a_missing_dim_is_refused():
    with pytest.raises(ValueError, match="shards dim 2 of a tensor with 2 dims"):
        DimSharding.from_placements((Shard(2), R), 2, MESH)


def test_costs_grow_with_the_bytes_and_nesting_is_undone():
    def cost(rows, source, target):
        return redistribute_cost(TensorInfo((rows, 8), source, torch.float32), target, MESH)

    assert cost(8, (Shard(0), R), (Shard(0), R)) == 0
    assert cost(8, (R, R), (Shard(0), Partial())) == 0
    assert cost(8192, (Shard(0), R), (R, R)) > cost(8, (Shard(0), R), (R, R))
    assert cost(8, (Shard(0), R), (Partial(), R)) == float("inf")
    # Freeing the outer of two nested shards means gathering both.
    assert cost(8, (Shard(0), Shard(0)), (R, Shard(0))) > cost(8, (Shard(0), R), (R, R))
