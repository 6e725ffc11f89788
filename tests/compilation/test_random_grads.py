"""Steps that clear, read, set and add to gradients in any order, and gradients that are others
before the next call. Compiled on a mesh against CPU torch.

A step is a list of what it does, drawn from a seed; so is what happens between its calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.compilation.changes import Mesh, Observation, World, assert_same, observe
from tests.compilation.changes._table import mlp

CALLS = 5
Tensors = list[torch.Tensor]


class Session:
    """A model, its optimizer, and gradients that somebody keeps.

    Attributes:
        kept: gradients of before, which the step may read; others may have come in their place.
    """

    def __init__(self, world: World) -> None:
        self.world, self.model = world, mlp(world)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05, momentum=0.5)
        self.kept: Tensors = []
        self.scale = 1.0
        world.watch(model=self.model)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x * self.scale).square().mean()

    def forward(self, x: torch.Tensor, losses: Tensors, seen: Tensors) -> None:
        losses.append(self.loss(x))

    def backward(self, x: torch.Tensor, losses: Tensors, seen: Tensors) -> None:
        (losses.pop() if losses else self.loss(x)).backward()

    def grad(self, x: torch.Tensor, losses: Tensors, seen: Tensors) -> None:
        seen += torch.autograd.grad(self.loss(x), self.parameters[:2])

    def cleared(self, x: torch.Tensor, losses: Tensors, seen: Tensors) -> None:
        self.optimizer.zero_grad()

    def zeroed(self, x: torch.Tensor, losses: Tensors, seen: Tensors) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def taken_away(self, x: torch.Tensor, losses: Tensors, seen: Tensors) -> None:
        for p in self.parameters[::2]:
            p.grad = None

    def assigned(self, x: torch.Tensor, losses: Tensors, seen: Tensors) -> None:
        for p in self.parameters[1::2]:
            p.grad = p.detach() * 0.1

    def read(self, x: torch.Tensor, losses: Tensors, seen: Tensors) -> None:
        seen += [p.grad.sum() for p in self.parameters if p.grad is not None]

    def read_kept(self, x: torch.Tensor, losses: Tensors, seen: Tensors) -> None:
        seen += [grad.sum() for grad in self.kept]

    def halved(self, x: torch.Tensor, losses: Tensors, seen: Tensors) -> None:
        for p in self.parameters:
            if p.grad is not None:
                p.grad.mul_(0.5)

    def clipped(self, x: torch.Tensor, losses: Tensors, seen: Tensors) -> None:
        seen.append(torch.nn.utils.clip_grad_norm_(self.parameters, 0.5))

    def stepped(self, x: torch.Tensor, losses: Tensors, seen: Tensors) -> None:
        self.optimizer.step()


INSIDE = ("forward", "backward", "grad", "cleared", "zeroed", "taken_away", "assigned", "read")
INSIDE = (*INSIDE, "read_kept", "halved", "clipped", "stepped", "forward", "cleared", "backward")


def keep(session: Session) -> None:
    session.kept[:] = [p.grad for p in session.parameters if p.grad is not None]


def keep_none(session: Session) -> None:
    session.kept.clear()


def clear(session: Session) -> None:
    session.optimizer.zero_grad()


def give(session: Session) -> None:
    for p in session.parameters:
        p.grad = p.detach() * 0.2


def give_one(session: Session) -> None:
    session.parameters[1].grad = session.parameters[1].detach() * 0.3


def double(session: Session) -> None:
    for p in session.parameters:
        if p.grad is not None:
            p.grad.mul_(2.0)


def scale(session: Session) -> None:
    session.scale *= 0.9


OUTSIDE: tuple[Callable[[Session], None], ...] = (
    *(keep, keep_none, clear, give, give_one, double, scale),
)


def program(world: World, seed: int) -> Iterator[Any]:
    rng = random.Random(seed)
    session = Session(world)
    actions = [rng.choice(INSIDE) for _ in range(rng.randint(3, 7))]

    def function(x: torch.Tensor) -> Tensors:
        losses: Tensors = []
        seen: Tensors = []
        for action in actions:
            getattr(session, action)(x, losses, seen)
        return [value.detach() for value in seen]

    step = world.compile(function)
    for i in range(CALLS):
        for change in rng.sample(OUTSIDE, rng.choice([0, 0, 1, 2])):
            change(session)
        found = step(world.batch(i))
        grads = [p.grad for p in session.parameters]
        yield found, [None if g is None else g.clone() for g in grads], list(session.kept)


def observations(world: World, seed: int) -> Iterator[Observation]:
    torch.manual_seed(seed)
    return observe(program(world, seed), world)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(80))
def test_compiled_as_torch(mesh_2x4: DeviceMesh, seed: int) -> None:
    expected = list(observations(World(), seed))
    for i, actual in enumerate(observations(Mesh(mesh_2x4), seed)):
        assert_same(actual, expected[i], f"call {i} with seed {seed}")
    assert i == CALLS - 1
