"""Changes of leaves: whether they need gradients, their hooks, their storage, their ``.grad``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.compilation.changes._table import Program, mlp, row, rows, trainer
from tests.compilation.changes._world import COLUMNS, Mesh, World, numbers


def pair(world: World) -> tuple[nn.Parameter, nn.Parameter, Callable]:
    """Two parameters, and a compiled SGD step written by hand that updates both."""
    first, second = (world.parameter(numbers(seed, 8, 6)) for seed in (0, 1))
    world.watch(first=first, second=second)

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        first.grad = second.grad = None
        loss = ((x @ first.T) * (x @ second.T)).sum() * 0.1
        loss.backward()
        with torch.no_grad():
            for parameter in (first, second):
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
        return [loss.detach(), first.detach().clone(), second.detach().clone()]

    return first, second, world.compile(step)


def accumulate(world: World) -> tuple[nn.Parameter, Callable]:
    """A parameter, and a compiled backward pass that leaves its gradient behind."""
    weight = world.parameter(numbers(0, 8, 6))
    world.watch(weight=weight)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x @ weight.T).pow(2).mean()
        loss.backward()
        return loss.detach()

    compiled = world.compile(step)
    return weight, lambda x: (compiled(x), weight.grad)


@rows(
    {
        "call": lambda p, value: p.requires_grad_(value),
        "attribute": lambda p, value: setattr(p, "requires_grad", value),
    }
)
def requires_grad(world: World, change: Callable) -> Program:
    _, second, step = pair(world)
    yield step(world.batch(0))
    yield step(world.batch(1))
    world.change(change, second, False)
    yield step(world.batch(2))
    yield step(world.batch(3))
    world.change(change, second, True)
    yield step(world.batch(4))


@row()
def requires_grad_from_the_start(world: World) -> Program:
    _, second, step = pair(world)
    second.requires_grad_(False)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(second.requires_grad_, True)
    yield step(world.batch(1))
    yield step(world.batch(2))


@row()
def requires_grad_of_a_plain_tensor(world: World) -> Program:
    weight, other = world.tensor(numbers(0, 8, 6)), world.parameter(numbers(1, 8, 6))

    def step() -> torch.Tensor:
        weight.grad = None
        (weight * other).sum().backward()
        return weight.grad if weight.grad is not None else torch.zeros(())

    step = world.compile(step)
    results = step()
    yield results
    world.change(weight.requires_grad_, True)
    yield step()


@row()
def requires_grad_read_in_python(world: World) -> Program:
    weight = world.parameter(numbers(0, 4, 6))
    step = world.compile(lambda x: x * 2 if weight.requires_grad else x)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(weight.requires_grad_, False)
    yield step(world.batch(0))


def triple(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(3)


TENSOR_HOOKS: dict[str, Callable[[nn.Parameter], Any]] = {
    "hook": lambda p: p.register_hook(lambda grad: grad * 3),
    "post_accumulate": lambda p: p.register_post_accumulate_grad_hook(triple),
}


@rows(TENSOR_HOOKS)
def hook_added(world: World, register: Callable) -> Program:
    _, second, step = pair(world)
    yield step(world.batch(0))
    yield step(world.batch(1))
    world.change(register, second)
    yield step(world.batch(2))


@rows(TENSOR_HOOKS)
def hook_removed(world: World, register: Callable) -> Program:
    _, second, step = pair(world)
    handle = register(second)
    yield step(world.batch(0))
    yield step(world.batch(1))
    world.change(handle.remove)
    yield step(world.batch(2))


@row()
def hook_that_reads_a_number(world: World) -> Program:
    _, second, step = pair(world)
    gain = 2.0
    second.register_hook(lambda grad: grad * gain)
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        gain = 3.0
    yield step(world.batch(1))


def fresh(world: World, seed: int = 7) -> torch.Tensor:
    return world.tensor(numbers(seed, 8, 6), COLUMNS)


@torch.no_grad()
def in_place(parameter: nn.Parameter, method: str, *args: Any) -> None:
    getattr(parameter, method)(*args)


VALUES: dict[str, Callable[[World, nn.Parameter], Any]] = {
    "data": lambda w, p: setattr(p, "data", fresh(w)),
    "data_zeros_like": lambda w, p: setattr(p, "data", torch.zeros_like(p)),
    "data_of_another_layout": lambda w, p: setattr(
        p, "data", w.tensor(numbers(7, 8, 6), None if isinstance(w, Mesh) else COLUMNS)
    ),
    "data_in_place": lambda w, p: p.data.mul_(2.0),
    "set": lambda w, p: in_place(p, "set_", fresh(w)),
    "copy": lambda w, p: in_place(p, "copy_", fresh(w)),
    "copy_from_the_cpu": lambda w, p: in_place(p, "copy_", numbers(7, 8, 6)),
    "mul": lambda w, p: in_place(p, "mul_", 2.0),
    "item": lambda w, p: in_place(p, "__setitem__", (0, slice(1, 3)), 5.0),
    "view_in_place": lambda w, p: in_place(p[1], "zero_"),
    "init": lambda w, p: nn.init.constant_(p, 0.5),
    "out": lambda w, p: (
        torch.zeros(8, 6) if not w.changes else torch.add(fresh(w), 1.0, out=p.detach())
    ),
}


@rows(VALUES)
def value(world: World, change: Callable[[World, nn.Parameter], Any]) -> Program:
    _, second, step = pair(world)
    yield step(world.batch(0))
    yield step(world.batch(1))
    world.change(change, world, second)
    yield step(world.batch(2))
    yield step(world.batch(3))


def by_data(world: World) -> tuple[nn.Module, nn.Module, dict[str, float], Callable]:
    """A model, and one that follows it as MoCo's does, by other memory in each step."""
    model = mlp(world)
    follower = copy.deepcopy(model).requires_grad_(False)
    rate = {"kept": 0.9}
    world.watch(model=model, follower=follower)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - follower(x)).pow(2).mean() + model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        for p, followed in zip(follower.parameters(), model.parameters(), strict=True):
            p.data = p.data * rate["kept"] + followed.data * (1 - rate["kept"])
        return loss.detach() + follower(x).mean()

    return model, follower, rate, world.compile(step)


FOLLOWERS: dict[str, Callable[[nn.Module, nn.Module, dict[str, float]], Any]] = {
    "rate": lambda model, follower, rate: rate.update(kept=0.5),
    "loaded": lambda model, follower, rate: follower.load_state_dict(
        {k: v * 0.5 for k, v in follower.state_dict().items()}
    ),
    "given": lambda model, follower, rate: setattr(
        follower[0].weight, "data", follower[0].weight.data * 0.5
    ),
    "shared": lambda model, follower, rate: setattr(
        follower[0].weight, "data", model[0].weight.data
    ),
}


@rows(FOLLOWERS)
def follower_by_data(
    world: World, change: Callable[[nn.Module, nn.Module, dict[str, float]], Any]
) -> Program:
    model, follower, rate, step = by_data(world)
    yield step(world.batch(0))
    yield step(world.batch(1))
    world.change(change, model, follower, rate)
    yield step(world.batch(2))
    yield step(world.batch(3))
    world.traced_at_most(3, step)


@rows({"detached": nn.Module.named_parameters, "state_dict": nn.Module.state_dict})
def follower_that_is_seen(world: World, look: Callable[[nn.Module], Any]) -> Program:
    """What showed its memory keeps what it was."""
    _, follower, _, step = by_data(world)
    yield step(world.batch(0))
    yield step(world.batch(1))
    seen = [value.detach() for _, value in dict(look(follower)).items()] if world.changes else []
    yield step(world.batch(2)), seen
    yield step(world.batch(3)), seen


@rows({"itself": lambda made: made, "cloned": torch.clone})
def memory_given_and_returned(world: World, result: Callable[[torch.Tensor], Any]) -> Program:
    """What the caller writes to it shows in the parameter that has it, too."""
    weight = world.parameter(numbers(0, 8, 6))
    world.watch(weight=weight)

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.data = made = weight.data * 0.9
        return result(made)

    compiled = world.compile(step)
    for i in range(3):
        made = compiled(world.batch(i))
        world.change(made.add_, 1.0)
        yield made, weight.detach().clone()


Cut = Callable[[torch.Tensor], list[torch.Tensor]]
BUFFERS: dict[str, Cut] = {
    "whole": lambda flat: [flat],
    "views": lambda flat: [flat[:2], flat[2:]],
}


@rows(BUFFERS)
def gradients_in_a_buffer(world: World, cut: Cut) -> Program:
    """Gradients that a step puts into somebody's memory, and a backward pass adds to it there."""
    flat = world.tensor(torch.zeros(4, 6), None)
    weights = [world.parameter(numbers(0, *part.shape), None) for part in cut(flat)]
    world.watch(flat=flat, **{f"weight{i}": weight for i, weight in enumerate(weights)})

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = sum((x @ weight.T).pow(2).mean() for weight in weights)
        for weight, part in zip(weights, cut(flat), strict=True):
            weight.grad = part
        loss.backward()
        return loss.detach()

    compiled = world.compile(step)
    x = world.tensor(numbers(3, 4, 6), None)
    yield compiled(x), flat, [weight.grad for weight in weights]
    yield compiled(x), flat
    world.change(weights[0].grad.zero_)
    yield flat, [weight.grad for weight in weights]
    yield compiled(x), flat
    world.change(flat.fill_, 2.0)
    yield flat, [weight.grad for weight in weights]
    world.traced_at_most(1, compiled)


@rows({"detached": 1, "of_another": 2})
def gradient_with_new_memory(world: World, kind: int) -> Program:
    """Of a gradient, which is another tensor in each call, and which others may show."""
    weight, other = (world.parameter(numbers(seed, 8, 6)) for seed in (0, 1))
    world.watch(weight=weight, other=other)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x @ weight.T).pow(2).mean()
        loss.backward()
        weight.grad.data = weight.grad.data * 0.5
        return loss.detach()

    compiled = world.compile(step)
    for i in range(3):
        yield compiled(world.batch(i)), weight.grad
    kept = weight.grad.detach()
    if world.changes and kind == 1:
        kept.mul_(3.0)
    if world.changes and kind == 2:
        other.grad = kept
    yield compiled(world.batch(3)), weight.grad, kept, other.grad


@row()
def values_swapped(world: World) -> Program:
    first, second, step = pair(world)
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        first.data, second.data = second.data, first.data
    yield step(world.batch(1))


@row()
def value_shared(world: World) -> Program:
    """Two parameters that share their memory from then on: a write shows in both."""
    first, second, step = pair(world)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(lambda: setattr(second, "data", first.data))
    yield step(world.batch(1))
    yield step(world.batch(2))


@rows({"copied": False, "assigned": True})
def load_state_dict(world: World, assign: bool) -> Program:
    model = mlp(world)
    _, step = trainer(world, model)
    start = copy.deepcopy({k: v.detach() for k, v in model.state_dict().items()})
    yield step(world.batch(0))
    yield step(world.batch(1))
    world.change(model.load_state_dict, start, assign=assign)
    yield step(world.batch(2))
    yield step(world.batch(3)), [p.detach() for p in model.parameters()]


@row()
def load_state_dict_of_a_frozen_copy(world: World) -> Program:
    """``assign=True`` keeps each parameter's own ``requires_grad``."""
    model = mlp(world)
    model[0].requires_grad_(False)
    world.watch(model=model)
    start = copy.deepcopy({k: v.detach() * 2 for k, v in model.state_dict().items()})

    def step(x: torch.Tensor) -> list:
        model.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return [loss.detach(), model[2].weight.grad]

    step = world.compile(step)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(model.load_state_dict, start, assign=True)
    yield step(world.batch(0))


def other_layout(world: World, weight: nn.Parameter) -> torch.Tensor:
    if isinstance(world, Mesh):
        return distribute_tensor(torch.ones(8, 6), world.mesh, [Shard(1), Replicate()])
    return torch.ones(8, 6)


GRADS: dict[str, Callable[[World, nn.Parameter], Any]] = {
    "none": lambda w, p: setattr(p, "grad", None),
    "tensor": lambda w, p: setattr(p, "grad", torch.ones_like(p)),
    "of_another_layout": lambda w, p: setattr(p, "grad", other_layout(w, p)),
    "zero": lambda w, p: p.grad.zero_(),
    "scaled": lambda w, p: p.grad.mul_(3.0),
    "data": lambda w, p: setattr(p.grad, "data", torch.ones_like(p)),
    "shared": lambda w, p: setattr(p, "grad", p.grad.view_as(p.grad)) or p.grad.add_(1),
    "accumulated_eagerly": lambda w, p: (p * 3).sum().backward(),
    "deleted": lambda w, p: delattr(p, "grad"),
}


@rows(GRADS)
def grad(world: World, change: Callable[[World, nn.Parameter], Any]) -> Program:
    weight, step = accumulate(world)
    yield step(world.batch(0))
    yield step(world.batch(1))
    world.change(change, world, weight)
    yield step(world.batch(2))
    yield step(world.batch(3))


@row()
def grad_before_the_first_call(world: World) -> Program:
    weight, step = accumulate(world)
    if world.changes:
        weight.grad = torch.ones_like(weight)
    yield step(world.batch(0))
    weight.grad = None
    yield step(world.batch(1))


@row()
def grad_kept_by_the_user(world: World) -> Program:
    """What the user holds is what torch accumulates into, in place."""
    weight, step = accumulate(world)
    yield step(world.batch(0))
    kept = weight.grad
    world.watch(kept=kept)
    yield step(world.batch(1)), kept
    if world.changes:
        kept.zero_()
    yield step(world.batch(2)), kept


@row()
def grad_of_another_leaf(world: World) -> Program:
    """One tensor as the gradient of two parameters."""
    first, second = (world.parameter(numbers(seed, 8, 6)) for seed in (0, 1))
    world.watch(first=first, second=second)

    def step(x: torch.Tensor) -> list:
        ((x @ first.T).sum() + (x @ second.T).pow(2).sum()).backward()
        return [first.grad.clone(), second.grad.clone()]

    step = world.compile(step)
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        second.grad = first.grad
    yield step(world.batch(1))


@row()
def leaf_becomes_part_of_a_graph(world: World) -> Program:
    """A captured tensor that is no leaf any more: the gradient goes further back."""
    base = world.parameter(numbers(0, 8, 6))
    holder = [base]
    world.watch(base=base)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x @ holder[0].T).sum()
        loss.backward()
        return loss.detach()

    step = world.compile(step)
    yield step(world.batch(0)), base.grad
    yield step(world.batch(0)), base.grad
    if world.changes:
        holder[0] = base * 2
    yield step(world.batch(1)), base.grad


@row()
def retain_grad_of_a_kept_tensor(world: World) -> Program:
    weight = world.parameter(numbers(0, 8, 6))
    kept: dict[str, torch.Tensor] = {}

    def step(x: torch.Tensor, keep: bool) -> torch.Tensor:
        hidden = x @ weight.T
        if keep:
            hidden.retain_grad()
        hidden.pow(2).sum().backward()
        return hidden.grad if keep else hidden.detach()

    step = world.compile(step)
    del kept
    yield step(world.batch(0), False)
    yield step(world.batch(0), world.changes)


@rows({"for_a_time": False, "from_then_on": True})
def history_made_inside_no_grad(world: World, stays: bool) -> Program:
    """The step makes a history where its caller doesn't want one."""
    weight = world.parameter(numbers(0, 8, 6))
    world.watch(weight=weight)
    holder = SimpleNamespace(on=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(before or holder.on)
        loss = (x @ weight.T).pow(2).sum()
        if not stays:
            torch.set_grad_enabled(before)
        return loss

    step = world.compile(step)
    for i in range(4):
        holder.on = world.changes and i != 2
        with torch.no_grad():
            loss = step(world.batch(i))
            on = torch.is_grad_enabled()
        if loss.requires_grad:
            loss.backward()
        yield loss.detach(), loss.requires_grad, on


@rows({"captured": False, "momentum": True})
def grad_that_was_also_another_tensor(world: World, momentum: bool) -> Program:
    """The step finds one tensor as ``.grad`` and elsewhere; then they are two."""
    weight = world.parameter(numbers(0, 8, 6))
    other = world.tensor(numbers(1, 8, 6), COLUMNS)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    if momentum:
        optimizer.state[weight]["momentum_buffer"] = other
    world.watch(weight=weight, other=other)
    weight.grad = other

    def step(x: torch.Tensor) -> torch.Tensor:
        (x @ weight.T).sum().backward()
        if momentum:
            optimizer.step()
        return other.sum()

    step = world.compile(step)
    yield step(world.batch(1))
    world.change(setattr, weight, "grad", torch.zeros_like(weight))
    yield step(world.batch(2))
    yield step(world.batch(3))


@row()
def exchanged(world: World) -> Program:
    """``swap_tensors`` gives each of two the other's memory."""
    first, second = (world.parameter(numbers(seed, 8, 6)) for seed in (0, 1))
    plain = [world.tensor(numbers(seed, 6)) for seed in (2, 3)]
    step = world.compile(lambda x: (x @ first.detach().T, x * plain[0]))
    x = world.batch()
    yield step(x)
    world.change(torch.utils.swap_tensors, first, second)
    yield step(x)
    world.change(torch.utils.swap_tensors, *plain)
    yield step(x)


@rows({"emptied": False, "replaced": True})
def hooks_of_a_dictionary(world: World, replaced: bool) -> Program:
    """Without the handle: by torch's own dictionary."""
    weight, step = accumulate(world)
    handle = weight.register_hook(lambda grad: grad * 2)
    yield step(world.batch(1))
    hooks = weight._backward_hooks
    if replaced:
        world.change(hooks.__setitem__, handle.id, lambda grad: grad * 5)
    else:
        world.change(hooks.clear)
    weight.grad = None
    yield step(world.batch(2))
