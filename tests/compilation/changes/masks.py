"""Masks whose count a step knows before it runs: what they are made of changes between calls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.compilation.changes._table import Program, row, rows
from tests.compilation.changes._world import World

Select = Callable[[torch.Tensor, Any], torch.Tensor]


def zeroed(x: torch.Tensor, first: int) -> torch.Tensor:
    mask = torch.ones(6, dtype=torch.bool, device=x.device)
    mask[:first] = False
    return mask


def one_by_one(x: torch.Tensor, kept: list[bool]) -> torch.Tensor:
    mask = torch.zeros(6, dtype=torch.bool)
    for i, keep in enumerate(kept):
        mask[i] = keep
    return mask.to(x.device)


FIRST, KEPT = (1, 3, 3, 2), ([True, False], [True, True], [False, True], [False, False])
# What a mask is made of, in four calls, and what the step takes by it.
MADE: dict[str, tuple[tuple[Any, ...], Select]] = {
    "number": (FIRST, lambda x, n: x[:, torch.arange(6, device=x.device) >= n]),
    "number_written": (FIRST, lambda x, n: x[:, zeroed(x, n)]),
    "number_on_the_host": (FIRST, lambda x, n: x[:, torch.arange(6) >= n]),
    "diagonal": (FIRST, lambda x, n: x[torch.ones_like(x).triu(n) == 1]),
    "selected": (FIRST, lambda x, n: x.masked_select(torch.arange(6, device=x.device) >= n)),
    "list": (KEPT, lambda x, k: x[:, torch.tensor([*k, *[True] * 4], device=x.device)]),
    "list_as_an_index": (KEPT, lambda x, k: x[:, [*k, *[True] * 4]]),
    "new_tensor": (KEPT, lambda x, k: x[:, x.new_tensor([*k, *[True] * 4], dtype=torch.bool)]),
    "list_written": (KEPT, lambda x, k: x[:, one_by_one(x, k)]),
}


@rows(MADE)
def what_a_mask_is_made_of(world: World, case: tuple[tuple[Any, ...], Select]) -> Program:
    values, select = case
    held = SimpleNamespace(value=values[0])
    of_held = world.compile(lambda x: select(x, held.value) * 2)
    of_argument = world.compile(lambda x, value: select(x, value) * 2)
    for value in values:
        world.change(setattr, held, "value", value)
        yield of_held(world.batch(0)), of_argument(world.batch(0), held.value)


def write(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[:, mask] = out[:, mask] * 2 + torch.arange(int(mask.sum()), device=x.device)
    return out


ON_THE_HOST: dict[str, Select] = {
    "select": lambda x, mask: x[:, mask],
    "select_computed": lambda x, mask: x[:, ~mask.flip(0)],
    "of_two_dims": lambda x, mask: x[mask & torch.ones(4, 1, dtype=torch.bool)],
    "write": write,
}


@rows(ON_THE_HOST)
def mask_on_the_host(world: World, use: Select) -> Program:
    """It may have another count, and with one count other positions."""
    mask = torch.tensor([True, False, True, True, False, True])
    of_held, of_argument = world.compile(lambda x: use(x, mask)), world.compile(use)
    for i in (None, 1, 0, 4, 5):
        if i is not None:
            world.change(mask.__setitem__, i, ~mask[i])
        yield of_held(world.batch(0)), of_argument(world.batch(0), mask)


@row()
def one_program_for_masks_of_one_count(world: World) -> Program:
    mask = torch.tensor([True, True, False, False, False, False])
    step = world.compile(lambda x: x[:, mask].sum(0))
    for shift in range(3):
        world.change(mask.copy_, mask.roll(shift))
        yield step(world.batch(0))
    world.traced_at_most(1, step)
