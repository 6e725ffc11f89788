"""Changes of optimizers: settings, groups, state, and which optimizer it is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import (
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RMSprop,
    lr_scheduler,
)

from tests.compilation.changes._table import Program, mlp, row, rows, trainer
from tests.compilation.changes._world import World, numbers


class Two(nn.Module):
    """Two parameters, one of them sharded."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.weight = world.parameter(numbers(0, 8, 6))
        self.bias = world.parameter(numbers(1, 8), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight.T)


# Class, its options, and what is set later. With ``foreach``, the default on accelerators, Nesterov
# momentum is added to the gradients in place, and CPU torch is asked to do so, too.
SETTINGS: dict[str, tuple[type[Optimizer], dict[str, Any], dict[str, Any]]] = {
    "lr_float": (SGD, {"lr": 0.1}, {"lr": 0.01}),
    "lr_int_to_int": (SGD, {"lr": 1}, {"lr": 2}),
    "lr_int_to_float": (SGD, {"lr": 1}, {"lr": 0.1}),
    "lr_float_to_int": (SGD, {"lr": 0.1}, {"lr": 1}),
    "lr_bool": (SGD, {"lr": 0.1}, {"lr": True}),
    "lr_float64": (SGD, {"lr": np.float64(0.1)}, {"lr": np.float64(0.5)}),
    "lr_float32": (SGD, {"lr": 0.1}, {"lr": np.float32(0.5)}),
    "lr_zero": (SGD, {"lr": 0.0}, {"lr": 0.1}),
    "lr_to_zero": (SGD, {"lr": 0.1}, {"lr": 0}),
    "lr_negative": (SGD, {"lr": 0.1}, {"lr": -0.1}),
    "lr_tensor_replaced": (SGD, {"lr": torch.tensor(0.1)}, {"lr": torch.tensor(0.5)}),
    "lr_float_to_tensor": (SGD, {"lr": 0.1}, {"lr": torch.tensor(0.5)}),
    "adam_lr_int": (Adam, {"lr": 1}, {"lr": 0.1}),
    "adamw_lr_tensor": (
        AdamW,
        {"lr": torch.tensor(0.1), "foreach": False},
        {"lr": torch.tensor(0.5)},
    ),
    "decay_from_zero": (SGD, {}, {"weight_decay": 0.5}),
    "decay_from_int_to_int": (SGD, {}, {"weight_decay": 1}),
    "decay_to_zero": (SGD, {"weight_decay": 0.5}, {"weight_decay": 0}),
    "momentum_from_zero": (SGD, {}, {"momentum": 0.9}),
    "momentum": (SGD, {"momentum": 0.9}, {"momentum": 0.5}),
    "momentum_to_zero": (SGD, {"momentum": 0.9}, {"momentum": 0.0}),
    "dampening": (SGD, {"momentum": 0.9}, {"dampening": 0.5}),
    "dampening_int": (SGD, {"momentum": 0.9}, {"dampening": 1}),
    "nesterov": (SGD, {"momentum": 0.9, "foreach": True}, {"nesterov": True}),
    "nesterov_off": (
        SGD,
        {"momentum": 0.9, "nesterov": True, "foreach": True},
        {"nesterov": False},
    ),
    "maximize": (SGD, {}, {"maximize": True}),
    "sgd_several": (SGD, {}, {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}),
    "adam_lr": (Adam, {}, {"lr": 0.01}),
    "adam_betas": (Adam, {}, {"betas": (0.5, 0.6)}),
    "adam_first_beta_zero": (Adam, {}, {"betas": (0.0, 0.999)}),
    "adam_betas_list": (Adam, {}, {"betas": [0.5, 0.6]}),
    "adam_eps": (Adam, {}, {"eps": 1.0}),
    "adam_eps_int": (Adam, {}, {"eps": 1}),
    "adam_amsgrad_off": (Adam, {"amsgrad": True, "betas": (0.9, 0.3)}, {"amsgrad": False}),
    "adam_decay": (Adam, {}, {"weight_decay": 0.5}),
    "adam_decoupled": (Adam, {"weight_decay": 0.5}, {"decoupled_weight_decay": True}),
    "adam_maximize": (Adam, {}, {"maximize": True}),
    "adamw_decay": (AdamW, {}, {"weight_decay": 0.9}),
    "adamw_decay_to_zero": (AdamW, {"weight_decay": 0.5}, {"weight_decay": 0}),
    "rmsprop_alpha": (RMSprop, {}, {"alpha": 0.5}),
    "rmsprop_eps": (RMSprop, {}, {"eps": 1.0}),
    "rmsprop_centered_off": (RMSprop, {"centered": True}, {"centered": False}),
    "rmsprop_momentum": (RMSprop, {"momentum": 0.9}, {"momentum": 0.5}),
    "adagrad_lr_decay": (Adagrad, {}, {"lr_decay": 0.5}),
    "adagrad_decay": (Adagrad, {}, {"weight_decay": 0.5}),
    "adagrad_eps": (Adagrad, {}, {"eps": 1.0}),
    "adadelta_rho": (Adadelta, {"lr": 10.0}, {"rho": 0.5}),
    "adamax_betas": (Adamax, {}, {"betas": (0.5, 0.6)}),
    "nadam_momentum_decay": (NAdam, {}, {"momentum_decay": 0.5}),
}


@rows(SETTINGS)
def setting(world: World, case: tuple[type[Optimizer], dict, dict]) -> Program:
    make, options, later = case
    optimizer, step = trainer(world, Two(world), make, **copy.deepcopy(options))
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(optimizer.param_groups[0].update, copy.deepcopy(later))
    yield step(world.batch(0))
    yield step(world.batch(0))
    yield step(world.batch(0))


@row()
def lr_tensor_in_place(world: World) -> Program:
    lr = torch.tensor(0.1)
    _, step = trainer(world, Two(world), lr=lr)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(lr.fill_, 0.5)
    yield step(world.batch(0))
    yield step(world.batch(0))


@row()
def lr_tensor_in_place_of_adam(world: World) -> Program:
    lr = torch.tensor(0.1)
    _, step = trainer(world, Two(world), Adam, lr=lr, foreach=False)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(lr.fill_, 0.5)
    yield step(world.batch(0))
    yield step(world.batch(0))


@row()
def lr_of_one_group(world: World) -> Program:
    model = Two(world)
    optimizer = SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    world.watch(model=model, optimizer=optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = world.compile(step)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(optimizer.param_groups[1].update, lr=0.5, weight_decay=0.5)
    yield step(world.batch(0))
    yield step(world.batch(0))


@row()
def users_own_entry(world: World) -> Program:
    """An entry of the group that only the step reads."""
    model = Two(world)
    optimizer = SGD(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    group["scale"] = 1.0

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean() * optimizer.param_groups[0]["scale"]
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = world.compile(step)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(group.update, scale=2.0)
    yield step(world.batch(0))


@row()
def setting_read_by_the_step(world: World) -> Program:
    optimizer = SGD(Two(world).parameters(), lr=0.1)
    step = world.compile(lambda x: x * optimizer.param_groups[0]["lr"])
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(optimizer.param_groups[0].update, lr=0.5)
    yield step(world.batch(0))


@row()
def setting_decides_in_the_step(world: World) -> Program:
    optimizer = SGD(Two(world).parameters(), lr=0.1)
    step = world.compile(lambda x: x * 2 if optimizer.param_groups[0]["lr"] > 0.3 else x)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(optimizer.param_groups[0].update, lr=0.5)
    yield step(world.batch(0))


SCHEDULES: dict[str, tuple[type[Optimizer], dict[str, Any], Callable]] = {
    "step_lr_of_an_int": (SGD, {"lr": 1}, lambda o: lr_scheduler.StepLR(o, 1)),
    "lambda_of_an_int": (SGD, {"lr": 1}, lambda o: lr_scheduler.LambdaLR(o, lambda i: i + 1)),
    "linear_of_adam": (Adam, {}, lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3)),
    "one_cycle": (AdamW, {}, lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=8)),
    "cyclic_momentum": (
        SGD,
        {"momentum": 0.9},
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.5, step_size_up=2),
    ),
    "of_a_tensor": (
        SGD,
        {"lr": torch.tensor(0.1)},
        lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    ),
    "of_adamw_with_a_tensor": (
        AdamW,
        {"lr": torch.tensor(0.1), "foreach": False},
        lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    ),
}


@rows(SCHEDULES)
def schedule(world: World, case: tuple[type[Optimizer], dict, Callable]) -> Program:
    make, options, make_scheduler = case
    optimizer, step = trainer(world, Two(world), make, **copy.deepcopy(options))
    scheduler = make_scheduler(optimizer)
    for i in range(4):
        yield step(world.batch(i))
        world.change(scheduler.step)
    world.at_most(3, step)


@rows({"foreach": {"foreach": True}, "single": {"foreach": False}})
def how_it_computes(world: World, later: dict[str, Any]) -> Program:
    """What is computed stays the same; together with another ``lr``, to see something."""
    optimizer, step = trainer(world, Two(world), Adam)
    yield step(world.batch(0))
    yield step(world.batch(1))
    world.change(optimizer.param_groups[0].update, lr=0.3, **later)
    yield step(world.batch(2))
    yield step(world.batch(3))


@row()
def fused_switched_on(world: World) -> Program:
    optimizer, step = trainer(world, Two(world), AdamW)
    yield step(world.batch(0))
    yield step(world.batch(1))
    world.change(optimizer.param_groups[0].update, lr=0.3, fused=True, foreach=False)
    yield step(world.batch(2))
    yield step(world.batch(3))


def half(world: World, make: type[Optimizer], **options: Any) -> tuple:
    """A model of which the optimizer has one parameter at first."""
    model = Two(world)
    optimizer = make([model.weight], lr=0.1, **options)
    world.watch(model=model, optimizer=optimizer)

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss.detach(), model.weight.detach().clone(), model.bias.detach().clone()]

    return model, optimizer, world.compile(step)


MEMBERS: dict[str, Callable[[Two, Optimizer], Any]] = {
    "group_added": lambda m, o: o.add_param_group({"params": [m.bias]}),
    "group_added_with_lr": lambda m, o: o.add_param_group({"params": [m.bias], "lr": 0.5}),
    "group_removed": lambda m, o: o.param_groups.clear(),
    "parameter_added": lambda m, o: o.param_groups[0]["params"].append(m.bias),
    "parameter_removed": lambda m, o: o.param_groups[0]["params"].pop(),
    "parameter_replaced": lambda m, o: o.param_groups[0].update(params=[m.bias]),
    "group_replaced": lambda m, o: o.param_groups.__setitem__(0, {**o.param_groups[0], "lr": 0.7}),
    "groups_replaced": lambda m, o: setattr(
        o, "param_groups", [{**o.param_groups[0], "params": [m.bias], "lr": 0.7}]
    ),
}


@rows({f"{name}-{c.__name__}": (c, f) for name, f in MEMBERS.items() for c in (SGD, Adam, Adagrad)})
def members(world: World, case: tuple[type[Optimizer], Callable]) -> Program:
    make, change = case
    model, optimizer, step = half(world, make)
    yield step(world.batch(0))
    yield step(world.batch(1))
    world.change(change, model, optimizer)
    yield step(world.batch(2))
    yield step(world.batch(3))


def first_state(optimizer: Optimizer) -> dict[str, Any]:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]


@torch.no_grad()
def zero(tensor: torch.Tensor) -> None:
    tensor.zero_()


STATES: dict[str, tuple[type[Optimizer], dict[str, Any], Callable[[Optimizer], Any]]] = {
    "cleared": (Adam, {}, lambda o: o.state.clear()),
    "cleared_of_sgd": (SGD, {"momentum": 0.9}, lambda o: o.state.clear()),
    "cleared_of_one": (Adam, {}, lambda o: o.state.pop(o.param_groups[0]["params"][0])),
    # Adagrad fills its state when it is made, and once more where there is none.
    "cleared_of_adagrad": (Adagrad, {}, lambda o: o.state.clear()),
    "cleared_of_one_of_adagrad": (
        Adagrad,
        {},
        lambda o: o.state.pop(o.param_groups[0]["params"][0]),
    ),
    "cleared_of_one_of_adagrad_in_a_loop": (
        Adagrad,
        {"foreach": False},
        lambda o: o.state.pop(o.param_groups[0]["params"][0]),
    ),
    "cleared_of_one_of_adafactor": (
        Adafactor,
        {},
        lambda o: o.state.pop(o.param_groups[0]["params"][0]),
    ),
    "new_dict": (Adam, {}, lambda o: o.__setattr__("state", type(o.state)(dict))),
    "replaced": (
        Adam,
        {},
        lambda o: first_state(o).update(exp_avg=torch.zeros_like(first_state(o)["exp_avg"])),
    ),
    "replaced_of_sgd": (
        SGD,
        {"momentum": 0.9},
        lambda o: first_state(o).update(
            momentum_buffer=torch.ones_like(first_state(o)["momentum_buffer"])
        ),
    ),
    "none_of_sgd": (
        SGD,
        {"momentum": 0.9},
        lambda o: first_state(o).update(momentum_buffer=None),
    ),
    "in_place": (Adam, {}, lambda o: zero(first_state(o)["exp_avg"])),
    "data": (
        Adam,
        {},
        lambda o: setattr(
            first_state(o)["exp_avg_sq"], "data", torch.ones_like(first_state(o)["exp_avg_sq"])
        ),
    ),
    "step_in_place": (Adam, {}, lambda o: first_state(o)["step"].fill_(100.0)),
    "step_replaced": (Adam, {}, lambda o: first_state(o).update(step=torch.tensor(100.0))),
    "of_rmsprop_in_place": (RMSprop, {}, lambda o: first_state(o)["square_avg"].fill_(3.0)),
    "of_adagrad_in_place": (Adagrad, {}, lambda o: first_state(o)["sum"].fill_(3.0)),
}


@rows(STATES)
def state(world: World, case: tuple[type[Optimizer], dict, Callable]) -> Program:
    make, options, change = case
    optimizer, step = trainer(world, Two(world), make, **options)
    for i in range(3):
        yield step(world.batch(i))
    world.change(change, optimizer)
    for i in range(3):
        yield step(world.batch(i))


@rows({"sgd": (SGD, {"momentum": 0.9}), "adam": (Adam, {}), "rmsprop": (RMSprop, {})})
def load_state_dict(world: World, case: tuple[type[Optimizer], dict]) -> Program:
    make, options = case
    optimizer, step = trainer(world, Two(world), make, **options)
    yield step(world.batch(0))
    yield step(world.batch(0))
    saved = copy.deepcopy(optimizer.state_dict())
    yield step(world.batch(1))
    yield step(world.batch(2))
    world.change(optimizer.load_state_dict, saved)
    yield step(world.batch(3))
    yield step(world.batch(4))


@rows({make.__name__: make for make in (Adam, RMSprop, NAdam)})
def all_but_one_frozen(world: World, make: type[Optimizer]) -> Program:
    """The step counts of all are one array; those of frozen parameters are none of the step's."""
    model = mlp(world)
    _, step = trainer(world, model, make, lr=0.05)
    rest = list(model.parameters())[1:]
    for round_ in range(2):
        for frozen in (False, True):
            world.change(lambda frozen=frozen: [p.requires_grad_(not frozen) for p in rest])
            for i in range(2):
                yield step(world.batch(4 * round_ + 2 * frozen + i))


@row()
def step_counts_of_another_step(world: World) -> Program:
    """One step sets some of the counts that the training step has as one array."""
    model = mlp(world)
    optimizer, step = trainer(world, model, Adam)
    parameters = list(model.parameters())

    def set_back() -> torch.Tensor:
        for parameter in parameters[:2]:
            optimizer.state[parameter]["step"].fill_(0)
        return optimizer.state[parameters[0]]["step"].add_(1) * 2

    set_back = world.compile(set_back)
    for i in range(3):
        yield step(world.batch(i))
        yield step(world.batch(i))
        if world.changes:
            yield float(set_back())
        else:
            yield 2.0


@row()
def load_state_dict_before_the_first_step(world: World) -> Program:
    model = Two(world)
    optimizer, step = trainer(world, model, Adam)
    other = Adam(model.parameters(), lr=0.5, betas=(0.5, 0.6))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    other.step()
    world.change(optimizer.load_state_dict, other.state_dict())
    yield step(world.batch(0))
    yield step(world.batch(1))


@row()
def load_state_dict_with_other_settings(world: World) -> Program:
    model = Two(world)
    optimizer, step = trainer(world, model, SGD, foreach=True)
    yield step(world.batch(0))
    yield step(world.batch(0))
    saved = SGD(model.parameters(), 0.5, 0.9, nesterov=True, foreach=True).state_dict()
    world.change(optimizer.load_state_dict, saved)
    yield step(world.batch(1))
    yield step(world.batch(2))
    yield step(world.batch(3))


@rows(
    {
        "same_class": functools.partial(SGD, lr=0.5, weight_decay=0.5),
        "other_class": functools.partial(AdamW, lr=0.3),
        "same_settings": functools.partial(SGD, lr=0.1, momentum=0.9),
    }
)
def another_optimizer_under_the_name(world: World, make: Callable[..., Optimizer]) -> Program:
    model = Two(world)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    world.watch(model=model, optimizer=optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = world.compile(step)
    yield compiled(world.batch(0))
    yield compiled(world.batch(1))
    if world.changes:
        optimizer = make(model.parameters())
        world.watch(optimizer=optimizer)
    yield compiled(world.batch(2))
    yield compiled(world.batch(3))
    yield compiled(world.batch(4))


SECOND = {"weight_decay": 1.0, "lr": 0.5, "momentum": 0.5, "maximize": True, "nesterov": True}


@rows({entry: {entry: value} for entry, value in SECOND.items()})
def setting_of_the_second_of_two(world: World, later: dict[str, Any]) -> Program:
    """Two optimizers of a class, as in a GAN."""
    first, second = Two(world), Two(world)
    optimizers = [SGD(m.parameters(), 0.1, 0.9, foreach=True) for m in (first, second)]
    world.watch(first=first, second=second, optimizers=optimizers)

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    step = world.compile(step)
    for i in range(2):
        yield step(world.batch(i))
    world.change(optimizers[1].param_groups[0].update, later)
    for i in range(2):
        yield step(world.batch(i))


@row()
def two_optimizers_of_one_class(world: World) -> Program:
    """Different settings from the start; then those of the first change."""
    model = mlp(world)
    slow, fast = Adam(model[0].parameters(), lr=0.01), Adam(model[2].parameters(), lr=0.2)
    world.watch(model=model, slow=slow, fast=fast)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        slow.step()
        fast.step()
        return loss.detach()

    step = world.compile(step)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(slow.param_groups[0].update, lr=0.3, betas=(0.5, 0.6))
    yield step(world.batch(1))
    yield step(world.batch(2))


@row()
def optimizers_swapped(world: World) -> Program:
    model = Two(world)
    pair = [SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.5)]

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        pair[0].step()
        return loss.detach()

    step = world.compile(step)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(pair.reverse)
    yield step(world.batch(0))
    yield step(world.batch(0))


@rows({"pre": "register_step_pre_hook", "post": "register_step_post_hook"})
def step_hook_added_and_removed(world: World, register: str) -> Program:
    model = Two(world)
    optimizer, step = trainer(world, model)

    @torch.no_grad()
    def halve(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        for parameter in model.parameters():
            parameter.mul_(0.5)

    yield step(world.batch(0))
    yield step(world.batch(0))
    handle = world.change(getattr(optimizer, register), halve)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(lambda: handle.remove())
    yield step(world.batch(0))
    yield step(world.batch(0))


@row()
def step_replaced(world: World) -> Program:
    """``optimizer.step`` patched on the instance, as gradient-clipping wrappers do."""
    model = Two(world)
    optimizer, step = trainer(world, model)
    plain = optimizer.step

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        plain()

    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(setattr, optimizer, "step", clipped)
    yield step(world.batch(0))
    yield step(world.batch(0))


@row()
def eager_step_in_between(world: World) -> Program:
    model = Two(world)
    optimizer, step = trainer(world, model, Adam)
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        model(world.batch(1)).sum().backward()
        optimizer.step()
    yield step(world.batch(2))
    yield step(world.batch(3))


@row()
def clipping_threshold(world: World) -> Program:
    model = Two(world)
    optimizer = SGD(model.parameters(), lr=0.1)
    most = 0.1

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        return loss.detach()

    compiled = world.compile(step)
    yield compiled(world.batch(0))
    yield compiled(world.batch(0))
    if world.changes:
        most = 1.0
    yield compiled(world.batch(0))
    yield compiled(world.batch(0))


class Warmup:
    """A schedule as users write them: it counts, and sets the learning rate."""

    def __init__(self, optimizer: Optimizer, changes: bool) -> None:
        self.optimizer, self.count, self.changes = optimizer, 0, changes

    def step(self) -> None:
        self.count += self.changes
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.count + 1) / 4)


SETTING: dict[str, Callable[[Optimizer, Warmup, float], None]] = {
    "constant": lambda o, w, lr: o.param_groups[0].update(lr=0.05),
    "argument": lambda o, w, lr: o.param_groups[0].update(lr=lr),
    "decayed": lambda o, w, lr: o.param_groups[0].update(lr=o.param_groups[0]["lr"] * 0.5),
    "warmup": lambda o, w, lr: w.step(),
    "weight_decay": lambda o, w, lr: o.param_groups[0].update(weight_decay=lr),
    "tensor": lambda o, w, lr: o.param_groups[0].update(lr=torch.tensor(0.05)),
}


def _setting(world: World, case: tuple[bool, str, Callable, dict]) -> Program:
    first, name, make, options = case
    model = mlp(world)
    optimizer = make(model.parameters(), lr=0.1, **options)
    warmup = Warmup(optimizer, world.changes)
    world.watch(model=model, optimizer=optimizer)
    setting = SETTING[name]

    def function(x: torch.Tensor, lr: float) -> torch.Tensor:
        if first and world.changes:
            setting(optimizer, warmup, lr)
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        if not first and world.changes:
            setting(optimizer, warmup, lr)
        return loss.detach()

    step = world.compile(function)
    for i in range(6):
        yield step(world.batch(0), 0.1 / (i + 1 if world.changes else 1))
    if name != "weight_decay" or not options:  # torch's fused Adam takes a float
        world.traced_at_most(4, step)
    world.change(optimizer.param_groups[0].update, lr=0.2)
    for i in range(2):
        yield step(world.batch(0), 0.1 / (i + 1 if world.changes else 1))


@rows(
    {
        f"{name}-{when}-{make.__name__}{'-fused' if options else ''}": (when == "first", name, *how)
        for name in SETTING
        for when in ("first", "last")
        for how in ((SGD, {}), (AdamW, {}), (Adam, {"fused": True}))
        for make, options in (how,)
    }
)
def setting_in_the_step(world: World, case: tuple[bool, str, Callable, dict]) -> Program:
    """The step sets what its optimizer goes by."""
    yield from _setting(world, case)


@rows(
    {
        f"{make.__name__}{'-fused' if options else ''}": (make, options)
        for make, options in (
            *((Adam, {}), (AdamW, {"fused": True}), (RMSprop, {}), (Adagrad, {})),
            *((Adamax, {}), (Adadelta, {}), (SGD, {"momentum": 0.9})),
        )
    },
    unseen=True,
)
def groups_of_other_sizes(world: World, case: tuple[Callable, dict]) -> Program:
    """Two groups, and a second optimizer: their step counts are equal, and stay so."""
    make, options = case
    first, second = mlp(world), world.module(nn.Linear(4, 2))
    groups = [
        {"params": [first[0].weight, first[0].bias, first[2].weight]},
        {"params": [first[2].bias], "weight_decay": 0.1},
    ]
    optimizers = [make(groups, lr=0.01, **options), make(second.parameters(), lr=0.02, **options)]
    world.watch(first=first, second=second, one=optimizers[0], two=optimizers[1])

    def function(x: torch.Tensor) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = second(first(x)).pow(2).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    step = world.compile(function)
    for i in range(5):
        yield step(world.batch(i))
    world.traced_at_most(2, step)


class Careful(SGD):
    """Steps in a way of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad.tanh(), alpha=0.5)


@row()
def another_class(world: World) -> Program:
    model = mlp(world)
    optimizer, step = trainer(world, model)
    yield step(world.batch(0))
    yield step(world.batch(1))
    world.change(setattr, optimizer, "__class__", Careful)
    yield step(world.batch(2))
    yield step(world.batch(3))
