"""A layout of one mesh said on another over the same devices."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.mesh.combinable import placements_on

R, S = Replicate(), Shard
SHAPES = [(8,), (2, 4), (4, 2), (2, 2, 2), (8, 1)]


def _pieces(value: torch.Tensor, mesh: xd.DeviceMesh, placements: tuple) -> list[torch.Tensor]:
    sharded = distribute_tensor(value, mesh, placements)
    by_device = {
        int(mesh.mesh.flatten()[i]): shard.data for i, shard in enumerate(sharded.local_shards)
    }
    return [by_device[device] for device in sorted(by_device)]


@pytest.mark.parametrize("order", [range(8), [0, 4, 1, 5, 2, 6, 3, 7]], ids=["near", "mixed"])
def test_it_is_the_same_layout_where_it_says_so(order: list[int]) -> None:
    meshes = [xd.DeviceMesh("xla", torch.tensor(list(order)).reshape(s)) for s in SHAPES]
    value = torch.arange(64.0).reshape(8, 8)
    same = 0
    for mesh, target in itertools.permutations(meshes, 2):
        for placements in itertools.product((R, S(0), S(1)), repeat=mesh.ndim):
            found, exact = placements_on(target, mesh, placements, 2)
            before = _pieces(value, mesh, placements)
            after = _pieces(value, target, found)
            assert exact == all(map(torch.equal, before, after)), (mesh, placements, target, found)
            assert all(b.numel() >= a.numel() for a, b in zip(before, after, strict=True))
            same += exact
    assert same > 100


def test_what_comes_first_of_the_cuts_is_kept() -> None:
    wide, tall = xd.init_device_mesh("xla", (2, 4)), xd.init_device_mesh("xla", (4, 2))
    line = xd.init_device_mesh("xla", (8,))
    assert placements_on(wide, tall, (S(0), R), 1) == ((S(0), R), False)
    assert placements_on(tall, wide, (S(0), S(0)), 1) == ((S(0), S(0)), True)
    assert placements_on(line, wide, (S(0), R), 1) == ((R,), False)
    assert placements_on(wide, line, (Partial(),), 1) == ((R, R), False)


def test_cuts_that_do_not_divide_each_other() -> None:
    one = xd.DeviceMesh("xla", torch.arange(6).reshape(2, 3))
    other = xd.DeviceMesh("xla", torch.arange(6).reshape(3, 2))
    assert placements_on(other, one, (S(0), R), 1) == ((R, R), False)
    assert placements_on(other, one, (R, R), 1) == ((R, R), True)
