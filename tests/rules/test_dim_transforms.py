"""View ops: transforms from shapes, shardings through them (in ``dims_mapping``), and back."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from xla_dtensor.rules import DimSharding
from xla_dtensor.rules.dim_transforms import (
    Broadcast,
    Flatten,
    InputDim,
    Repeat,
    Singleton,
    Split,
    expand,
    movedim,
    permute,
    repeat,
    reshape,
    squeeze,
    transpose,
    unsqueeze,
)
from xla_dtensor.rules.merging import shard_dim, split_factor
from xla_dtensor.rules.view_propagation import propagate

I = InputDim  # noqa: E741


def F(*dims: int) -> Flatten:
    return Flatten(tuple(map(InputDim, dims)))


@pytest.mark.parametrize(
    ("before", "after", "transforms"),
    [
        ((6, 12, 24, 48), (72, 24, 6, 8),
         (F(0, 1), I(2), Split(I(3), (6, 8), 0), Split(I(3), (6, 8), 1))),
        ((2, 3), (3, 2), (Split(F(0, 1), (3, 2), 0), Split(F(0, 1), (3, 2), 1))),
        ((4, 8), (4, 8), (I(0), I(1))),
        ((4, 8), (1, 4, 1, 8), (Singleton(), I(0), Singleton(), I(1))),
        ((1, 8), (1, 2, 4), (I(0), Split(I(1), (2, 4), 0), Split(I(1), (2, 4), 1))),
        ((2, 1, 4), (8,), (F(0, 2),)),
        ((), (1,), (Singleton(),)),
        ((0, 4), (0, 2, 2), (I(0), Broadcast(2), Broadcast(2))),
    ],
)  # fmt: skip
def test_reshape(before, after, transforms):
    assert reshape(before, after) == transforms


def test_the_other_views():
    assert permute([2, 0, -2]) == (I(2), I(0), I(1))
    assert transpose(3, 0, -1) == (I(2), I(1), I(0))
    assert movedim(3, [0], [2]) == (I(1), I(2), I(0))
    assert squeeze((4, 1, 1), [1]) == (I(0), I(2))
    assert squeeze((4, 1, 1)) == (I(0),)
    assert unsqueeze(2, -1) == (I(0), I(1), Singleton())
    assert expand((4, 1), (3, 4, 5)) == (Broadcast(3), I(0), Broadcast(5))
    assert repeat(2, [2, 1, 3]) == (Broadcast(2), I(0), Repeat(I(1), 3))


MESH = (2, 4)
# transforms, input shape, output shape, input mapping, the mapping it is used in, output mapping
FORWARD = [
    (reshape, (8, 16, 8), (128, 8), [0, -1, 1], [0, -1, 1], [0, 1]),
    (reshape, (8, 16, 8), (128, 8), [[0, 1], -1, -1], [[0, 1], -1, -1], [[0, 1], -1]),
    (reshape, (64, 8), (8, 8, 8), [0, 1], [0, 1], [0, -1, 1]),
    (reshape, (64, 8), (8, 8, 8), [[0, 1], -1], [[0, 1], -1], [[0, 1], -1, -1]),
    # The leading factor is used up by one mesh dim; the next goes on to the second factor.
    (reshape, (8, 8), (2, 4, 8), [[0, 1], -1], [[0, 1], -1], [0, 1, -1]),
    # A factor that the mesh dim does not divide; uneven shards.
    (reshape, (12, 8), (3, 4, 8), [0, 1], [-1, 1], [-1, -1, 1]),
    (reshape, (6, 4), (24,), [1, -1], [-1, -1], [-1]),
    (reshape, (8, 16), (16, 8), [0, 1], [0, -1], [0, -1]),
    (permute, (8, 16, 8), (2, 0, 1), [0, 1, -1], [0, 1, -1], [-1, 0, 1]),
    (expand, (8, 1), (3, 8, 5), [0, 1], [0, -1], [-1, 0, -1]),
]


@pytest.mark.parametrize(("build", "before", "after", "given", "used", "out"), FORWARD)
def test_forward(build, before, after, given, used, out):
    transforms = permute(after) if build is permute else build(before, after)
    placements = DimSharding.from_dims_mapping(given).placements(MESH)
    inputs, outputs = propagate(transforms, placements, before, MESH)
    assert DimSharding.from_placements(inputs, len(before), MESH).dims_mapping == used
    assert DimSharding.from_placements(outputs, len(transforms), MESH).dims_mapping == out


def test_an_inner_dim_of_a_flatten_is_strided():
    transforms = reshape((8, 16, 8), (8, 128))
    placements = (Shard(2), Shard(0))
    assert propagate(transforms, placements, (8, 16, 8), MESH)[1] == (
        _StridedShard(1, split_factor=16),
        Shard(0),
    )
    used, _ = propagate(transforms, placements, (8, 16, 8), MESH, strided=False)
    assert shard_dim(used[0]) is None
    # Splitting it again gives the shard back.
    back = reshape((8, 128), (8, 16, 8))
    strided = (_StridedShard(1, split_factor=16), Shard(0))
    assert propagate(back, strided, (8, 128), MESH)[1] == placements


# output mapping -> input mapping
def piece(x: torch.Tensor, placements: tuple[Placement, ...], at: tuple[int, ...]) -> torch.Tensor:
    """What the device `at` holds of `x`: mesh dims cut in order, a strided one within groups."""
    for placement, n, i in zip(placements, MESH, at, strict=True):
        dim = shard_dim(placement)
        if dim is not None:
            groups = x.unflatten(dim, (split_factor(placement), n, -1))
            x = groups.select(dim + 1, i).flatten(dim, dim + 1)
    return x


def random_factors(rng: random.Random, total: int) -> list[int]:
    factors = []
    while total > 1:
        factors.append(rng.choice([d for d in range(1, total + 1) if total % d == 0]))
        total //= factors[-1]
    return factors + [1] * rng.randrange(2)


@pytest.mark.parametrize("seed", range(60))
def test_a_reshape_moves_no_data(seed):
    """Every device's piece of the input is, in order, its piece of the output."""
    rng = random.Random(seed)
    total = rng.choice([64, 96, 128, 256, 384])
    before, after = random_factors(rng, total), random_factors(rng, total)
    x = torch.arange(total).reshape(before)
    choices = [None, *range(len(before))]
    for dims in itertools.product(choices, repeat=2):
        placements = DimSharding(
            tuple(tuple(m for m, d in enumerate(dims) if d == dim) for dim in range(len(before)))
        ).placements(MESH)
        if any(
            before[d] % math.prod(n for n, e in zip(MESH, dims, strict=True) if e == d)
            for d in range(len(before))
        ):
            continue
        used, out = propagate(reshape(before, after), placements, before, MESH)
        for at in itertools.product(*map(range, MESH)):
            mine, theirs = piece(x, used, at), piece(x.reshape(after), out, at)
            assert torch.equal(mine.flatten(), theirs.flatten()), (before, after, used, out)
        # And through a second view, from whatever (strided) layout the first one gave.
        third = random_factors(rng, total)
        used, last = propagate(reshape(after, third), out, after, MESH)
        for at in itertools.product(*map(range, MESH)):
            mine, theirs = piece(x.reshape(after), used, at), piece(x.reshape(third), last, at)
            assert torch.equal(mine.flatten(), theirs.flatten()), (after, third, used, last)
