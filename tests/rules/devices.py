"""What the devices of a mesh hold of a tensor, and the tensor that they hold: torch on the CPU."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement

from xla_dtensor.rules import Placements
from xla_dtensor.rules.merging import reduction_name, shard_dim, split_factor

At = tuple[int, ...]
"""A device, by its coordinates."""

COMBINE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda terms: terms.sum(0),
    "avg": lambda terms: terms.mean(0),
    "max": lambda terms: terms.amax(0),
    "min": lambda terms: terms.amin(0),
    "product": lambda terms: terms.prod(0),
    "norm2": lambda terms: terms.square().sum(0).sqrt(),
}


def devices(mesh: Sequence[int]) -> Iterator[At]:
    return itertools.product(*map(range, mesh))


def chunk(x: Tensor, dim: int, n: int) -> list[Tensor]:
    """As ``torch.chunk``, and empty pieces for the devices that get nothing."""
    pieces = list(x.chunk(n, dim)) if x.shape[dim] else []
    empty = x.narrow(dim, 0, 0)
    return pieces + [empty] * (n - len(pieces))


def cut(x: Tensor, placement: Placement, n: int, i: int) -> Tensor:
    """Device `i`'s piece along one mesh dim; a strided shard takes one of each group."""
    dim = shard_dim(placement)
    if dim is None:
        return x
    if split_factor(placement) == 1:
        return chunk(x, dim, n)[i]
    groups = chunk(x, dim, split_factor(placement))
    return torch.cat([chunk(group, dim, n)[i] for group in groups], dim)


def piece(x: Tensor, placements: Placements, mesh: Sequence[int], at: At) -> Tensor:
    """What the device `at` holds of `x`: mesh dims cut in order, each what earlier ones left."""
    for placement, n, i in zip(placements, mesh, at, strict=True):
        x = cut(x, placement, n, i)
    return x


def parts(
    x: Tensor, placements: Placements, mesh: Sequence[int], rng: random.Random
) -> dict[At, Tensor]:
    """What every device holds of `x`. What is pending is of random terms."""
    pending = [m for m, p in enumerate(placements) if isinstance(p, Partial)]
    coordinates = list(itertools.product(*(range(mesh[m]) for m in pending)))
    terms = dict.fromkeys(coordinates, x)
    if pending:
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        drawn = torch.rand(len(coordinates), *x.shape, dtype=x.dtype, generator=generator) + 0.5
        names = {reduction_name(placements[m]) for m in pending}
        averaged = math.prod(mesh[m] for m in pending if placements[m] == Partial("avg"))
        drawn[0] = 0
        if names <= {"sum", "avg"}:
            drawn[0] = x * averaged - drawn.sum(0)
        elif names <= {"max", "min"}:
            drawn = x - drawn if names == {"max"} else x + drawn
        else:
            assert names == {"product"}
            drawn[0] = 1
            drawn[0] = x / drawn.prod(0)
        terms = dict(zip(coordinates, drawn, strict=True))
    return {
        at: piece(terms[tuple(at[m] for m in pending)], placements, mesh, at)
        for at in devices(mesh)
    }


def assemble(
    pieces: dict[At, Tensor], placements: Placements, mesh: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """The tensor that devices hold `pieces` of: shards joined, pending reductions done.

    AssertionError if a piece has not the shape of its shard, or replicas differ.
    """
    for mesh_dim in reversed(range(len(mesh))):
        placement = placements[mesh_dim]
        if isinstance(placement, Partial):
            combine = COMBINE[reduction_name(placement)]
            line = range(mesh[mesh_dim])
            combined: dict[At, Tensor] = {}
            for at in pieces:
                own = [pieces[(*at[:mesh_dim], i, *at[mesh_dim + 1 :])] for i in line]
                combined[at] = combine(torch.stack(own)).to(own[0].dtype)  # booleans stay so
            pieces = combined
    whole = torch.full(tuple(shape), torch.nan, dtype=torch.float64)
    positions = torch.arange(whole.numel()).reshape(whole.shape)
    for at, own in pieces.items():
        where = piece(positions, placements, mesh, at)
        assert own.shape == where.shape, (at, tuple(own.shape), tuple(where.shape))
        known = whole.view(-1)[where]
        same = known.isnan() | torch.isclose(own.to(torch.float64), known)
        assert same.all(), f"the device {at} has another value than its replica"
        whole.view(-1)[where] = own.to(torch.float64)
    return whole
