"""The table that rows are entered in, and the pieces their programs share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.compilation.changes._world import World

Program = Iterator[Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """One change, and the program that makes it.

    Attributes:
        program: makes its tensors in a `World`, and yields what a user would look at after every
            call of the compiled step.
        unseen: the change must not show in what is yielded.
        slow: not part of the fast suite.
    """

    name: str
    program: Callable[[World], Program]
    unseen: bool = False
    slow: bool = False


TABLE: dict[str, Row] = {}


def row(*, unseen: bool = False, slow: bool = False) -> Callable:
    """Enter the decorated program as a row with its module's and its own name."""

    def enter(program: Callable[..., Program]) -> Callable[..., Program]:
        _enter(program, "", program, unseen, slow)
        return program

    return enter


def rows(variants: dict[str, Any], *, unseen: bool = False, slow: bool = False) -> Callable:
    """Enter the decorated program once for each variant, which is its second argument.

    Of more than four variants every second is fast, of more than twelve every third.
    """

    def enter(program: Callable[..., Program]) -> Callable[..., Program]:
        every = 1 if len(variants) <= 4 else 2 if len(variants) <= 12 else 3
        for i, (name, variant) in enumerate(variants.items()):
            one = lambda world, variant=variant: program(world, variant)
            left_out = slow or i % every != 0
            _enter(program, f"-{name}", one, unseen, left_out)
        return program

    return enter


def _enter(
    program: Callable, suffix: str, one: Callable[[World], Program], unseen: bool, slow: bool
) -> None:
    name = f"{program.__module__.rpartition('.')[2]}-{program.__name__}{suffix}"
    assert name not in TABLE, name
    TABLE[name] = Row(name, one, unseen, slow)


def mlp(world: World) -> nn.Sequential:
    return world.module(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))


def forward(world: World, model: Callable) -> Callable:
    """A compiled step that is the model's forward, without gradients."""
    return world.compile(lambda x: model(x).detach())


def trainer(
    world: World,
    model: nn.Module,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> tuple[torch.optim.Optimizer, Callable]:
    """An optimizer, and a compiled training step that returns the loss; both watched."""
    optimizer = make(model.parameters(), **{"lr": 0.1, **options})
    world.watch(model=model, optimizer=optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return optimizer, world.compile(step)
