"""Pads, crops and slices of them, forward and backward, in layouts that XLA gets wrong."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

from tests.conftest import make_mesh
from tests.lowering.test_strided import Program, check, way  # noqa: F401


def test_a_row_of_two_together(way: str) -> None:  # noqa: F811
    """What comes back to one of them is nothing but padding."""
    program = lambda x: torch.cat([x, x.sign()])[-2].sin()
    check(program, torch.randn(3), make_mesh("2x4"), [Replicate(), Shard(0)], way)


def test_part_of_the_padding(way: str) -> None:  # noqa: F811
    program = lambda x: (F.pad(x, [2, 0], value=0.5).chunk(2)[0].sin() + x).sum()
    check(program, torch.randn(2), make_mesh("8"), [Shard(0)], way)


def test_labels_of_the_next_token(way: str) -> None:  # noqa: F811
    """As in the losses of transformers."""
    program = lambda x: (F.pad(x, (0, 1), value=-1.0)[..., 1:].sin() * x).sum()
    check(program, torch.randn(4, 6), make_mesh("2x4"), [Shard(0), Shard(1)], way)


def relative(rng: random.Random, shape: list[int]) -> Program:
    """A few pads, crops and slices of one another, with sums on the way."""
    plan, sizes = [], list(shape)
    for _ in range(rng.randint(2, 4)):
        dim = rng.randrange(len(sizes))
        before, after = rng.randint(1 - sizes[dim], 4), rng.randint(0, 4)
        sizes[dim] += before + after
        start = rng.randrange(sizes[dim])
        length = rng.randint(1, sizes[dim] - start)
        sizes[dim] = length
        plan.append((dim, before, after, rng.choice([0.0, 0.5]), start, length))

    def program(x: torch.Tensor) -> torch.Tensor:
        total = x.sin().sum()
        for dim, before, after, value, start, length in plan:
            widths = [0, 0] * (x.ndim - 1 - dim) + [before, after]
            x = F.pad(x, widths, value=value)
            total = total + x.cos().sum()
            x = x.narrow(dim, start, length)
            total = total + (x * x).sum()
        return total

    return program


@pytest.mark.one_in(9)
@pytest.mark.parametrize("shape", ["2x4", "4x2", "2x2x2", "8"])
@pytest.mark.parametrize("seed", range(2))
def test_relatives(shape: str, seed: int, way: str) -> None:  # noqa: F811
    rng, mesh = random.Random(f"{shape} {seed}"), make_mesh(shape)
    sizes = [rng.choice([1, 2, 3, 5, 6, 8, 9]) for _ in range(rng.randint(1, 3))]
    layout = [rng.choice([Replicate(), *map(Shard, range(len(sizes)))]) for _ in range(mesh.ndim)]
    check(relative(rng, sizes), torch.randn(sizes, dtype=torch.float64), mesh, layout, way)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["2x4", "4x2", "2x2x2", "8"])
@pytest.mark.parametrize("seed", range(100, 125))
def test_many_relatives(shape: str, seed: int, way: str) -> None:  # noqa: F811
    test_relatives(shape, seed, way)
