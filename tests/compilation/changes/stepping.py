"""What happens inside of an optimizer's ``step``: hooks, subclasses, closures and schedulers that
change hyperparameters, state and gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop, lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.compilation.changes._table import Program, mlp, row, rows
from tests.compilation.changes._world import World

Edit = Callable[[Optimizer], Any]
MAKERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"momentum": 0.9}),
    "sgd_fused": (SGD, {"fused": True}),
    "sgd_single": (SGD, {"momentum": 0.9, "foreach": False}),
    "adam": (Adam, {}),
    "adamw_fused": (AdamW, {"fused": True}),
    "adamw_single": (AdamW, {"foreach": False}),
    "rmsprop": (RMSprop, {"foreach": True}),
}


def subclass(make: type[Optimizer], before: Edit | None, after: Edit | None) -> Any:
    """The class whose ``step`` edits the optimizer before or after that of ``make``."""

    class Editing(make):  # type: ignore[valid-type, misc]
        def step(self, closure: Any = None) -> Any:
            if before is not None:
                before(self)
            loss = super().step(closure)
            if after is not None:
                after(self)
            return loss

    Editing.__name__ = make.__name__
    return Editing


def program(
    world: World,
    where: str,
    edit: Edit,
    make: type[Optimizer],
    options: dict[str, Any],
    calls: int = 5,
) -> Program:
    """Training in which ``edit`` is applied to the optimizer in each step, from ``where``."""
    model = mlp(world)

    def changing(optimizer: Optimizer, *_: Any) -> None:
        if world.changes:
            edit(optimizer)

    if where == "before":
        make = subclass(make, changing, None)
    elif where == "after":
        make = subclass(make, None, changing)
    optimizer = make(model.parameters(), **{"lr": 0.1, **copy.deepcopy(options)})
    world.watch(model=model, optimizer=optimizer)
    handles = []
    if where in ("pre", "post"):
        getattr(optimizer, f"register_step_{where}_hook")(changing)
    elif where == "global_pre":
        handles.append(register_optimizer_step_pre_hook(changing))
    elif where == "global_post":
        handles.append(register_optimizer_step_post_hook(changing))

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    def function(x: torch.Tensor) -> torch.Tensor:
        if where == "closure":

            def closure() -> torch.Tensor:
                changing(optimizer)
                return loss_of(x)

            return optimizer.step(closure).detach()
        if where == "in_between":
            changing(optimizer)
        loss = loss_of(x)
        optimizer.step()
        return loss.detach()

    step = world.compile(function)
    try:
        for i in range(calls):
            yield step(world.batch(i))
        for group in optimizer.param_groups:  # from outside, too
            group["lr"] = torch.tensor(0.2) if isinstance(group["lr"], torch.Tensor) else 0.2
        for i in range(2):
            yield step(world.batch(i))
    finally:
        for handle in handles:
            handle.remove()


WHERE = (
    *("pre", "post", "before", "after", "global_pre", "global_post", "closure"),
    "in_between",
)


def in_groups(change: Callable[[dict[str, Any]], Any]) -> Edit:
    def edit(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            change(group)

    return edit


def halve(group: dict[str, Any]) -> None:
    group["lr"] *= 0.5


@rows(
    {
        f"{where}-{name}": (where, *how)
        for where in WHERE
        for name, how in MAKERS.items()
        if name in ("sgd", "adam", "adamw_fused") or where in ("pre", "before")
    }
)
def lr_halved(world: World, case: tuple[str, type[Optimizer], dict]) -> Program:
    where, make, options = case
    yield from program(world, where, in_groups(halve), make, options)


def decide(group: dict[str, Any]) -> None:
    if group["lr"] > 0.03:
        group["lr"] = group["lr"] / 2


def added(group: dict[str, Any]) -> None:
    """An entry of its own, which isn't there at first."""
    group["scale"] = group["scale"] * 0.5 if "scale" in group else 1.0
    group["lr"] = 0.1 * group["scale"]


def put_back(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        lr = group["lr"]
        group["lr"] = 10.0
        group["lr"] = lr
        group["weight_decay"] = lr


# The optimizer, and what is done to it.
EDITS: dict[str, tuple[type[Optimizer], dict[str, Any], Edit]] = {
    "constant": (SGD, {}, in_groups(lambda g: g.update(lr=0.03))),
    "sum": (SGD, {}, in_groups(lambda g: g.update(lr=g["lr"] + 0.1 * g["weight_decay"] + 0.01))),
    "least": (SGD, {}, in_groups(lambda g: g.update(lr=max(g["lr"] * 0.5, 0.03)))),
    "math": (SGD, {}, in_groups(lambda g: g.update(lr=0.1 * math.cos(20 * g["lr"])))),
    "decided": (SGD, {}, in_groups(decide)),
    "put_back": (SGD, {}, put_back),
    "added": (SGD, {}, in_groups(added)),
    "momentum": (SGD, {"momentum": 0.9}, in_groups(lambda g: g.update(momentum=0.8 * g["lr"]))),
    "decay": (AdamW, {}, in_groups(lambda g: g.update(weight_decay=g["weight_decay"] + 0.3))),
    "betas": (Adam, {}, in_groups(lambda g: g.update(betas=(g["betas"][0] * 0.8, 0.9)))),
    "eps": (Adam, {}, in_groups(lambda g: g.update(eps=0.1 + g["eps"]))),
    "maximize": (SGD, {}, in_groups(lambda g: g.update(maximize=not g["maximize"]))),
    "nesterov": (
        SGD,
        {"momentum": 0.9, "foreach": True},
        in_groups(lambda g: g.update(nesterov=not g["nesterov"])),
    ),
    "tensor": (SGD, {"lr": torch.tensor(0.1)}, in_groups(lambda g: g["lr"].mul_(0.5))),
    "adam_tensor": (
        Adam,
        {"lr": torch.tensor(0.1), "foreach": False},
        in_groups(lambda g: g["lr"].mul_(0.5)),
    ),
    "tensor_replaced": (
        SGD,
        {"lr": torch.tensor(0.1)},
        in_groups(lambda g: g.update(lr=g["lr"] * 0.5)),
    ),
    "dampening": (
        SGD,
        {"momentum": 0.9},
        in_groups(lambda g: g.update(dampening=g["dampening"] + 1)),
    ),
}


@rows(
    {
        f"{name}-{where}": (where, edit, make, options)
        for name, (make, options, edit) in EDITS.items()
        for where in ("pre", "post", "before", "closure")
    }
)
def edited(world: World, case: tuple[str, Edit, type[Optimizer], dict]) -> Program:
    yield from program(world, *case)


def each(change: Callable[[Optimizer, torch.Tensor], Any]) -> Edit:
    @torch.no_grad()
    def edit(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                change(optimizer, parameter)

    return edit


def scale_buffer(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    if "exp_avg" in optimizer.state[parameter]:
        optimizer.state[parameter]["exp_avg"].mul_(0.5)


def replace_buffer(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    state = optimizer.state[parameter]
    if "exp_avg" in state:
        state["exp_avg"] = state["exp_avg"] * 0.5


def slow_weights(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    """Entries of its own, as Lookahead has them."""
    state = optimizer.state[parameter]
    if "slow" not in state:
        state["slow"] = parameter.detach().clone()
    state["slow"].lerp_(parameter, 0.3)
    parameter.copy_(state["slow"])


def remove_buffer(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    optimizer.state[parameter].pop("momentum_buffer", None)


def sign(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad = parameter.grad.sign()


def flipped(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.neg_().add_(parameter, alpha=0.1)


# The optimizer, and what is done to its state and its gradients.
TOUCHED: dict[str, tuple[type[Optimizer], dict[str, Any], Edit]] = {
    "buffer_scaled": (Adam, {}, each(scale_buffer)),
    "buffer_replaced": (Adam, {}, each(replace_buffer)),
    "slow_weights": (SGD, {}, each(slow_weights)),
    "slow_weights_of_adam": (Adam, {}, each(slow_weights)),
    "buffer_removed": (SGD, {"momentum": 0.9}, each(remove_buffer)),
    "state_cleared": (Adam, {}, lambda o: o.state.clear()),
    "parameters_scaled": (SGD, {"momentum": 0.9}, each(lambda o, p: p.mul_(0.9))),
    "gradients_flipped": (SGD, {"momentum": 0.9}, each(flipped)),
    "gradients_replaced": (Adam, {}, each(sign)),
    "gradients_clipped": (
        SGD,
        {"momentum": 0.9},
        lambda o: nn.utils.clip_grad_norm_(o.param_groups[0]["params"], 0.05),
    ),
    "one_frozen": (Adam, {}, lambda o: setattr(o.param_groups[0]["params"][0], "grad", None)),
}


@rows(
    {
        f"{name}-{where}": (where, edit, make, options)
        for name, (make, options, edit) in TOUCHED.items()
        for where in ("pre", "post", "before")
        # torch's Adam takes a state that has anything for one that has all; behind the update a
        # gradient is of no consequence.
        if (where != "post" if "gradients" in name or name == "one_frozen" else True)
        and (where == "post" or name != "slow_weights_of_adam")
    }
)
def touched(world: World, case: tuple[str, Edit, type[Optimizer], dict]) -> Program:
    yield from program(world, *case)


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
}


@rows(
    {
        f"{name}-{where}": (where, make)
        for name, make in SCHEDULES.items()
        for where in ("pre", "post", "after", "another")
    }
)
def scheduler_in_a_hook(world: World, case: tuple[str, Callable]) -> Program:
    where, schedule = case
    model = mlp(world)
    holder: dict[str, Any] = {}

    def go_on(optimizer: Optimizer, *_: Any) -> None:
        if world.changes:
            holder["schedule"].step()

    make = subclass(SGD, None, go_on) if where == "after" else SGD
    optimizer = make(model[0].parameters(), lr=0.1, momentum=0.9)
    other = SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    holder["schedule"] = schedule(optimizer)
    world.watch(model=model, optimizer=optimizer, other=other)
    if where in ("pre", "post"):
        getattr(optimizer, f"register_step_{where}_hook")(go_on)
    elif where == "another":
        other.register_step_pre_hook(go_on)

    def function(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        other.step()
        return loss.detach()

    step = world.compile(function)
    for i in range(5):
        yield step(world.batch(i))


@rows({"reads": False, "sets": True})
def behind_a_scheduler(world: World, sets: bool) -> Program:
    """What stands in a group behind a scheduler's step is what the scheduler has put there."""
    model = mlp(world)
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    world.watch(model=model, optimizer=optimizer)

    def function(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        if world.changes:
            schedule.step()
        if sets and world.changes:
            optimizer.param_groups[0]["lr"] = 0.3
        return loss.detach() * optimizer.param_groups[0]["lr"]

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i))


@rows({name: MAKERS[name] for name in ("sgd", "adam")})
def two_param_groups(world: World, case: tuple[type[Optimizer], dict]) -> Program:
    """A hook that goes by what it finds in another group."""
    make, options = case
    model = mlp(world)
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()], "lr": 0.2}]
    optimizer = make(groups, lr=0.1, **options)
    world.watch(model=model, optimizer=optimizer)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if world.changes:
            first, second = optimizer.param_groups
            first["lr"], second["lr"] = second["lr"] * 0.9, first["lr"]

    optimizer.register_step_pre_hook(hook)

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = world.compile(function)
    for i in range(5):
        yield step(world.batch(i))
    world.at_most(2, step)


@row()
def groups_added(world: World) -> Program:
    model = mlp(world)
    optimizer = SGD(model[0].parameters(), lr=0.1)
    world.watch(model=model, optimizer=optimizer)

    def function(x: torch.Tensor) -> torch.Tensor:
        if len(optimizer.param_groups) == 1 and world.changes:
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.3})
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i))


FACTOR = 0.5


class Schedule:
    """A hook that is an object: it counts."""

    factor = 1.0

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.count += 1
        for group in optimizer.param_groups:
            group["lr"] = self.factor * 0.1 / self.count


@row()
def hook_with_a_global(world: World) -> Program:
    """What a hook reads is watched."""
    global FACTOR
    FACTOR = 0.5

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * FACTOR

    model = mlp(world)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(hook)
    world.watch(model=model, optimizer=optimizer)

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = world.compile(function)
    yield step(world.batch(0))
    yield step(world.batch(1))
    if world.changes:
        FACTOR = 2.0
    yield step(world.batch(2))
    yield step(world.batch(3))
    FACTOR = 0.5


@rows({"own": False, "global": True})
def hook_that_counts(world: World, everywhere: bool) -> Program:
    model = mlp(world)
    optimizer = AdamW(model.parameters(), lr=0.1)
    schedule = Schedule()
    world.watch(model=model, optimizer=optimizer, schedule=vars(schedule))

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = world.compile(function)
    yield step(world.batch(0))
    yield step(world.batch(1))
    register = optimizer.register_step_pre_hook
    if everywhere:
        register = register_optimizer_step_pre_hook
    handle = world.change(register, schedule)
    try:
        for i in range(5):
            yield step(world.batch(i))
        world.change(setattr, schedule, "factor", 3.0)
        yield step(world.batch(0))
    finally:
        world.change(lambda: handle.remove())
    yield step(world.batch(1))
    yield step(world.batch(2))


@row()
def steps_twice(world: World) -> Program:
    """Two steps of one optimizer in one call, with another ``lr`` in between."""
    model = mlp(world)
    optimizer = Adam(model.parameters(), lr=0.1)
    world.watch(model=model, optimizer=optimizer)

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            if world.changes:
                optimizer.param_groups[0]["lr"] *= 0.7
        return loss.detach()

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i))
    world.at_most(2, step)


@row()
def reading_costs_nothing(world: World) -> Program:
    """A step that reads hyperparameters is one program for all of them."""
    model = mlp(world)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    world.watch(model=model, optimizer=optimizer)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        group = optimizer.param_groups[0]
        optimizer.zero_grad()
        loss = model(x).pow(2).mean() + group["lr"] * model[0].weight.pow(2).sum()
        loss.backward()
        optimizer.step()
        return loss.detach(), group["lr"] * group["momentum"]

    step = world.compile(function)
    for i in range(5):
        yield step(world.batch(i))
        world.change(optimizer.param_groups[0].update, lr=0.1 / (i + 2), momentum=0.5 + 0.1 * i)
    world.traced_at_most(2, step)


@row()
def groups_that_share_a_tensor(world: World) -> Program:
    """One ``lr`` in two groups, of which the step replaces one."""
    model = mlp(world)
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()]}]
    optimizer = SGD(groups, lr=torch.tensor(0.1))
    world.watch(model=model, optimizer=optimizer)

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        if world.changes:
            optimizer.param_groups[0]["lr"] = 0.5 * optimizer.param_groups[1]["lr"]
        return loss.detach()

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i))


@row()
def cpu_argument_that_is_captured(world: World) -> Program:
    """A CPU tensor that is an argument and a captured tensor, and then is one of them alone."""
    captured = torch.tensor(2.0)
    step = world.compile(lambda x, t: x * t + 10 * captured)
    yield step(world.batch(0), captured)
    yield step(world.batch(0), torch.tensor(3.0) if world.changes else captured)
    yield step(world.batch(0), captured)
