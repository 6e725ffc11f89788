"""Steps put together at random that look at values of tensors that they find, and changes of those
between the calls: compiled on a mesh against CPU torch.

Each piece reads or writes the state, and decides by it; what is written with the argument isn't
known before the step, and whoever looks at it then is refused. So a step's pieces are drawn in an
order in which nobody does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from tests.compilation.changes import Mesh, World, assert_same, observe

CALLS = 8
State = SimpleNamespace
Piece = Callable[[State, torch.Tensor, float, int], torch.Tensor]


def _counts(s: State, x: torch.Tensor, u: float, n: int) -> torch.Tensor:
    s.count.add_(n)
    return x


def _begins(s: State, x: torch.Tensor, u: float, n: int) -> torch.Tensor:
    if not s.flag:
        s.flag.fill_(True)
        x = x * 3
    return x


def _turns(s: State, x: torch.Tensor, u: float, n: int) -> torch.Tensor:
    s.mask.logical_not_()
    return x


def _goes_over(s: State, x: torch.Tensor, u: float, n: int) -> torch.Tensor:
    for i in range(int(s.count[n]) % 4):
        x = x + i * u
    return x


def _on_the_host(s: State, x: torch.Tensor, u: float, n: int) -> torch.Tensor:
    doubled = s.scale.cpu() * 2
    return x + doubled.sum().to(x.device) if float(doubled[n]) > u else x


def _keeps(s: State, x: torch.Tensor, u: float, n: int) -> torch.Tensor:
    s.other = s.scale * 2
    return x + s.other


def _moves(s: State, x: torch.Tensor, u: float, n: int) -> torch.Tensor:
    s.scale.lerp_(torch.ones_like(s.scale) * x.mean().sigmoid(), u)
    return x


LOOKING: list[Piece] = [
    *(_counts, _begins, _turns, _goes_over, _on_the_host, _keeps),
    lambda s, x, u, n: x * 2 if s.scale[n] > u else x + 1,
    lambda s, x, u, n: x - 1 if (s.scale * n > 2 * u).any() else x * 0.5,
    lambda s, x, u, n: x * s.scale.sum().item() + s.scale[n].item(),
    lambda s, x, u, n: x + n if s.count[n].item() % n == 0 else x,
    lambda s, x, u, n: x + x[:, s.mask].sum(1, keepdim=True),
    lambda s, x, u, n: x + x.index_select(1, (s.count > n + 2).nonzero().flatten()).sum(),
    lambda s, x, u, n: x + sum(s.count.tolist()) * 0.1,
    lambda s, x, u, n: x + torch.cat([s.scale, s.scale]).max().item(),
    lambda s, x, u, n: x * 1.5 if torch.equal(s.mask, s.count > 2) else x,
    lambda s, x, u, n: x * float(s.on_host) + s.scale[n].item() * s.on_host.item(),
    lambda s, x, u, n: torch.where(s.mask, x, x * u),
]


def _relaid(world: World, s: State, n: int) -> None:
    if isinstance(world, Mesh):
        s.scale = s.scale.redistribute(world.mesh, [Replicate(), Shard(0)])
    else:
        s.scale = s.scale.clone()


CHANGES: list[Callable[[World, State, int], Any]] = [
    lambda world, s, n: None,
    lambda world, s, n: s.scale.mul_(0.5),
    lambda world, s, n: s.count[n].fill_(n),
    lambda world, s, n: s.mask.logical_not_(),
    lambda world, s, n: s.flag.zero_(),
    lambda world, s, n: s.on_host.mul_(1.1),
    lambda world, s, n: setattr(s, "mask", world.tensor(torch.arange(6) % 2 == 0)),
    lambda world, s, n: world.compile(lambda: s.scale.mul_(0.9).sum() + s.count.add_(1).sum())(),
    _relaid,
]


def program(world: World, seed: int) -> Iterator[Any]:
    drawn = random.Random(seed)
    pieces = [(p, drawn.random(), drawn.randrange(1, 4)) for p in drawn.choices(LOOKING, k=4)]
    pieces += [(_moves, drawn.random(), 1)] * drawn.randrange(2)
    state = SimpleNamespace(
        scale=world.tensor(torch.rand(6)),
        count=world.tensor(torch.randint(0, 6, (6,))),
        mask=world.tensor(torch.rand(6) > 0.4),
        flag=world.tensor(torch.tensor(False), None),
        on_host=torch.tensor(1.25),
        other=None,
    )
    world.watch(state=state)

    def step(x: torch.Tensor) -> torch.Tensor:
        for piece, share, n in pieces:
            x = piece(state, x, share, n)
        return x

    compiled = world.compile(step)
    for call in range(CALLS):
        drawn.choice(CHANGES)(world, state, drawn.randrange(6))
        yield compiled(world.batch(call))


SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed > 4 else []) for seed in range(40)]


@pytest.mark.parametrize("seed", SEEDS)
def test_as_torch(mesh_2x4: DeviceMesh, seed: int) -> None:
    found = []
    for world in (World(), Mesh(mesh_2x4)):
        torch.manual_seed(seed)
        found.append(list(observe(program(world, seed), world)))
    for call, (wanted, seen) in enumerate(zip(*found, strict=True)):
        assert_same(seen, wanted, f"after call {call}")
