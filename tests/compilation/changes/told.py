"""Changes of what torch has been told beside the step: operators, autograd's hooks, and modules
that TorchScript keeps in C++."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.library import custom_op

from tests.compilation.changes._table import Program, mlp, row, rows
from tests.compilation.changes._world import World, numbers

_numbers = itertools.count()


def _operator(options: SimpleNamespace) -> tuple[Any, str]:
    """An operator that multiplies, and its gradient by what ``options`` say; and its name."""
    name = f"times{next(_numbers)}"

    def times(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * options.backward

    operator = custom_op(
        f"xla_dtensor_changes::{name}", times, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operator.register_fake(torch.empty_like)
    operator.register_autograd(backward)
    return operator, name


# How a step comes by the operator; called with itself and its name.
REACHED: dict[str, Callable[[Any, str], Callable]] = {
    "itself": lambda operator, name: operator,
    "packet": lambda operator, name: getattr(torch.ops.xla_dtensor_changes, name),
    "overload": lambda operator, name: getattr(torch.ops.xla_dtensor_changes, name).default,
    "partial": lambda operator, name: functools.partial(operator),
}


@rows(REACHED)
def custom_operator(world: World, reach: Callable[[Any, str], Callable]) -> Program:
    options = SimpleNamespace(backward=2.0)
    operator, name = _operator(options)
    reached = reach(operator, name)
    model = mlp(world)

    def step(x: torch.Tensor) -> Any:
        y = reached(model(x))
        return y.detach(), torch.autograd.grad(y.sum(), model[0].weight)

    compiled = world.compile(step)
    yield compiled(world.batch())
    world.change(setattr, options, "backward", 5.0)
    yield compiled(world.batch())
    world.change(operator.register_autograd, lambda ctx, grad: grad * 7)
    yield compiled(world.batch())


@row()
def what_saved_tensor_hooks_read(world: World) -> Program:
    model, options = mlp(world), SimpleNamespace(scale=10.0)

    def step(x: torch.Tensor) -> Any:
        return torch.autograd.grad(model(x).square().sum(), model[0].weight)

    compiled = world.compile(step)
    for scale in (10.0, 2.0):
        world.change(setattr, options, "scale", scale)
        with saved_tensors_hooks(
            lambda t: (t * options.scale).round(), lambda t: t / options.scale
        ):
            gradients = compiled(world.batch())
        yield gradients


@row()
def other_saved_tensor_hooks(world: World) -> Program:
    model = mlp(world)

    def step(x: torch.Tensor) -> Any:
        return torch.autograd.grad(model(x).square().sum(), model[0].weight)

    compiled = world.compile(step)
    for by in (2.0, 3.0, 2.0):
        factor = by if world.changes else 2.0
        with saved_tensors_hooks(lambda t, by=factor: t * by, lambda t: t):
            gradients = compiled(world.batch())
        yield gradients
    world.traced_at_most(2, compiled)


# TorchScript reads annotations, and these would be text.
class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.inner.weight.data = numbers(0, 4, 6)
        self.inner.bias.data = numbers(1, 4)
        self.scale = 2.0
        self.table = {"by": [2]}

    def forward(self, x):  # type: ignore[no-untyped-def]
        y = self.inner(x) * self.scale * self.table["by"][0]
        if self.training:
            return y.tanh()
        return y


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 1

    def forward(self, x):  # type: ignore[no-untyped-def]
        self.count += 1
        return x * self.count


def script(world: World, module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module).to(world.device)


SCRIPTED: dict[str, Callable[[Any], Any]] = {
    "eval": lambda m: m.eval(),
    "number": lambda m: setattr(m, "scale", 0.5),
    "dict": lambda m: setattr(m, "table", {"by": [3]}),
    "parameter_written": lambda m: m.inner.weight.data.mul_(3),
    "parameter_replaced": lambda m: setattr(
        m.inner, "weight", nn.Parameter(m.inner.weight.detach() * 3)
    ),
    "state_dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
}


@rows(SCRIPTED)
def scripted_module(world: World, change: Callable[[Any], Any]) -> Program:
    model = script(world, Options())
    outer = nn.Sequential(model)
    step = world.compile(lambda x: outer(x).detach())
    yield step(world.batch())
    yield step(world.batch())
    world.change(change, model)
    yield step(world.batch())


@row()
def traced_module(world: World) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.trace(Options().inner, numbers(2, 4, 6)).to(world.device)
    step = world.compile(lambda x: model(x).detach())
    yield step(world.batch())
    world.change(model.weight.data.mul_, 3)
    yield step(world.batch())
    world.change(setattr, model, "weight", nn.Parameter(model.weight.detach() * 3))
    yield step(world.batch())


@row()
def scripted_module_that_counts(world: World) -> Program:
    model = script(world, Counting())
    step = world.compile(lambda x: model(x))
    yield step(world.batch())
    world.change(setattr, model, "count", 7)
    yield step(world.batch())
