"""Training whose hyperparameters, state and gradients are changed inside of ``optimizer.step()``,
at random: what by, where, and when that begins and ends. Compiled on a mesh against CPU torch.

A sequence is drawn once, from its seed, and then runs in both worlds. Before each call hooks come
and go, and groups and state are changed from outside, too.
"""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.compilation.changes import EagerMesh, Mesh, Observation, World, assert_same, observe
from tests.compilation.changes._table import mlp
from tests.compilation.changes.own_optimizers import (
    Counting,
    Factored,
    Items,
    Lion,
    Replacing,
    ScheduleFree,
)

CALLS = 6
OPTIMIZERS: dict[str, Callable[[], tuple[type[Optimizer], dict[str, Any]]]] = {
    "sgd": lambda: (SGD, {"momentum": 0.9}),
    "sgd_fused": lambda: (SGD, {"momentum": 0.5, "fused": True}),
    "adam": lambda: (Adam, {}),
    "adam_single": lambda: (Adam, {"foreach": False}),
    "adamw_fused": lambda: (AdamW, {"fused": True}),
    "adam_tensor": lambda: (Adam, {"lr": torch.tensor(0.1), "foreach": False}),
    "lion": lambda: (Lion, {}),
    "factored": lambda: (Factored, {}),
    "schedule_free": lambda: (ScheduleFree, {}),
    "counting": lambda: (Counting, {}),
    "items": lambda: (Items, {}),
    "replacing": lambda: (Replacing, {}),
}

Edit = Callable[[Optimizer], Any]
INSIDE: dict[str, Edit] = {}
OUTSIDE: dict[str, Edit] = {}


def inside(edit: Edit) -> Edit:
    INSIDE[edit.__name__] = edit
    return edit


def outside(edit: Edit) -> Edit:
    OUTSIDE[edit.__name__] = edit
    return edit


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@inside
def halve_lr(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.6


@inside
def lr_by_threshold(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if group["lr"] < 0.05:
            group["lr"] = 0.08


@inside
def lr_of_the_last_group(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.9 * optimizer.param_groups[-1]["lr"]


@inside
def decay(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] += 0.05


@inside
def betas(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if "betas" in group:
            first, second = group["betas"]
            group["betas"] = (first * 0.95, second)


@inside
def momentum(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if "momentum" in group:
            group["momentum"] *= 0.9


@inside
@torch.no_grad()
def gradients(optimizer: Optimizer) -> None:
    for p in parameters(optimizer):
        if p.grad is not None:
            p.grad.mul_(0.7)


@inside
@torch.no_grad()
def weights(optimizer: Optimizer) -> None:
    for p in parameters(optimizer):
        p.mul_(0.98)


@inside
@torch.no_grad()
def state(optimizer: Optimizer) -> None:
    for p in parameters(optimizer):
        for name in ("exp_avg", "momentum_buffer", "momentum"):
            if optimizer.state[p].get(name) is not None:
                optimizer.state[p][name].mul_(0.8)


@inside
@torch.no_grad()
def state_replaced(optimizer: Optimizer) -> None:
    for p in parameters(optimizer):
        for name in ("exp_avg", "momentum_buffer", "momentum"):
            if optimizer.state[p].get(name) is not None:
                optimizer.state[p][name] = optimizer.state[p][name] * 0.8


@outside
def set_lr(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(0.07)
        else:
            group["lr"] = 0.07


@outside
def set_betas(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (0.8, 0.95)


@outside
@torch.no_grad()
def scale_state(optimizer: Optimizer) -> None:
    state(optimizer)


@outside
def load(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


@outside
def clear(optimizer: Optimizer) -> None:
    optimizer.state.clear()


@outside
def freeze_all_but_the_last(optimizer: Optimizer) -> None:
    *others, last = parameters(optimizer)
    last.requires_grad_()
    for p in others:
        p.requires_grad_(False)


@outside
def turn_about(optimizer: Optimizer) -> None:
    """Every second parameter is frozen, or no longer."""
    for p in parameters(optimizer)[::2]:
        p.requires_grad_(not p.requires_grad)


class Session:
    """A model with its optimizer, and what edits it at the moment.

    Attributes:
        edits: the edits made in each step: (where, which, what takes it away again).
    """

    def __init__(self, world: World, name: str) -> None:
        make, options = OPTIMIZERS[name]()
        session = self

        class Editing(make):  # type: ignore[valid-type, misc]
            def step(self, closure: Any = None) -> Any:
                session.edit("before")
                loss = super().step(closure)
                session.edit("after")
                return loss

        Editing.__name__ = make.__name__
        self.world, self.model = world, mlp(world)
        groups = [
            {"params": list(self.model[0].parameters())},
            {"params": list(self.model[2].parameters())},
        ]
        if "lr" not in options:
            groups[1]["lr"] = 0.06
        self.optimizer = Editing(groups, **{"lr": 0.1, **options})
        if isinstance(self.optimizer, ScheduleFree):
            self.optimizer.train()
        self.edits: list[tuple[str, str, Any]] = []
        self.other = SGD([world.parameter(torch.ones(8))], lr=0.1)
        self.schedule = lr_scheduler.StepLR(self.other, 1, gamma=0.5)
        world.watch(model=self.model, optimizer=self.optimizer, other=self.other)

    def edit(self, where: str) -> None:
        for place, name, _ in self.edits:
            if place == where:
                INSIDE[name](self.optimizer)

    def add(self, where: str, name: str) -> None:
        edit = INSIDE[name]

        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            edit(self.optimizer)

        register = {
            "pre": self.optimizer.register_step_pre_hook,
            "post": self.optimizer.register_step_post_hook,
            "global_pre": register_optimizer_step_pre_hook,
            "global_post": register_optimizer_step_post_hook,
        }.get(where)
        self.edits.append((where, name, None if register is None else register(hook)))

    def remove(self, position: int) -> None:
        _, _, handle = self.edits.pop(position)
        if handle is not None:
            handle.remove()

    def train(self, x: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            self.edit("closure")
            self.optimizer.zero_grad()
            loss = self.model(x).pow(2).mean()
            loss.backward()
            return loss

        self.edit("outside")
        return self.optimizer.step(closure).detach()


WHERE = ("pre", "post", "global_pre", "global_post", "before", "after", "closure", "outside")


def plan(seed: str) -> list[list[tuple[str, ...]]]:
    """For each call, what is done before it."""
    rng = random.Random(seed)
    found: list[list[tuple[str, ...]]] = []
    for _ in range(CALLS):
        actions: list[tuple[str, ...]] = []
        for _ in range(rng.choice([0, 1, 1, 2])):
            kind = rng.choice(["add", "add", "add", "remove", "outside"])
            if kind == "add":
                actions.append(("add", rng.choice(WHERE), rng.choice(list(INSIDE))))
            elif kind == "remove":
                actions.append(("remove", str(rng.randrange(10))))
            else:
                actions.append(("outside", rng.choice(list(OUTSIDE))))
        found.append(actions)
    return found


def program(world: World, name: str, actions: list[list[tuple[str, ...]]]) -> Iterator[Any]:
    session = Session(world, name)
    step = world.compile(lambda x: session.train(x))
    try:
        for i, before in enumerate(actions):
            for kind, *what in before:
                if kind == "add":
                    session.add(*what)
                elif kind == "outside":
                    OUTSIDE[what[0]](session.optimizer)
                elif session.edits:
                    session.remove(int(what[0]) % len(session.edits))
            yield step(world.batch(i))
    finally:
        while session.edits:
            session.remove(0)


def observations(world: World, name: str, seed: int) -> Iterator[Observation]:
    torch.manual_seed(seed)
    return observe(program(world, name, plan(f"{name} {seed}")), world)


def check(world: World, name: str, seed: int) -> None:
    expected = list(observations(World(), name, seed))
    for i, actual in enumerate(observations(world, name, seed)):
        assert_same(actual, expected[i], f"call {i} of {plan(f'{name} {seed}')}")
        assert torch.isfinite(expected[i].results["result"])
    assert i == CALLS - 1


@pytest.mark.one_in(40)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_compiled_as_torch(mesh_2x4: DeviceMesh, name: str, seed: int) -> None:
    check(Mesh(mesh_2x4), name, seed)


@pytest.mark.one_in(13)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_eagerly_as_torch(mesh_2x4: DeviceMesh, name: str, seed: int) -> None:
    check(EagerMesh(mesh_2x4), name, seed)


def test_every_edit_is_drawn() -> None:
    drawn = collections.Counter[str]()
    for name, seed in itertools.product(OPTIMIZERS, range(12)):
        for actions in plan(f"{name} {seed}"):
            drawn.update(word for action in actions for word in action[1:])
    wanted = {*INSIDE, *OUTSIDE, *WHERE}
    assert wanted <= drawn.keys() and min(drawn[word] for word in wanted) > 10, drawn
