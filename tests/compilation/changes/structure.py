"""How compiled steps are used: nested, as methods, next to eager code, after errors."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam

from tests.compilation.changes._table import Program, forward, mlp, row, rows, trainer
from tests.compilation.changes._world import World, numbers


@row()
def step_in_a_step(world: World) -> Program:
    inner = world.compile(lambda x: x.sum())
    outer = world.compile(lambda x: inner(x) + x.sum())
    yield outer(world.batch(0))
    yield outer(world.batch(1 if world.changes else 0))


@row()
def step_in_a_step_that_trains(world: World) -> Program:
    model = mlp(world)
    optimizer, train = trainer(world, model, Adam)
    twice = world.compile(lambda x: [train(x), train(x)])
    yield twice(world.batch(0))
    yield twice(world.batch(0))
    world.change(optimizer.param_groups[0].update, lr=0.5)
    yield twice(world.batch(1))
    yield train(world.batch(2))
    yield twice(world.batch(3))


@row()
def step_in_a_step_whose_gradient_is_taken(world: World) -> Program:
    weight = world.parameter(numbers(1, 4, 6))
    inner = world.compile(lambda x: (x * weight).pow(2).sum())

    def function(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        inner(x).backward()
        return weight.grad * 1

    step = world.compile(function)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(weight.data.mul_, 2.0)
    yield step(world.batch(1))


@row()
def step_in_a_step_that_reads_a_number(world: World) -> Program:
    scale = 2.0
    inner = world.compile(lambda x: x * scale)
    outer = world.compile(lambda x: inner(x) + 1)
    yield outer(world.batch(0))
    yield outer(world.batch(0))
    if world.changes:
        scale = 3.0
    yield outer(world.batch(0))


def methods(world: World) -> type:
    class Model:
        def __init__(self, seed: int) -> None:
            self.weight = world.tensor(numbers(seed, 4, 6))
            self.scale = float(seed)

        @world.compile
        def step(self, x: torch.Tensor) -> torch.Tensor:
            """Multiplies."""
            return x * self.weight * self.scale

        @world.compile
        def write(self, x: torch.Tensor) -> None:
            self.weight.add_(x)

    return Model


@row()
def a_method(world: World) -> Program:
    own = methods(world)
    a, b = own(1), own(2)
    assert own.step.__name__ == "step" and own.step.__doc__ == "Multiplies."
    yield a.step(world.batch(0))
    yield (b if world.changes else a).step(world.batch(0))
    world.change(setattr, a, "scale", 5.0)
    yield a.step(world.batch(0)), own.step(b, world.batch(0))


@row()
def a_method_that_writes(world: World) -> Program:
    own = methods(world)
    a, b = own(1), own(2)
    a.write(world.batch(0))
    yield a.weight, b.weight
    (b if world.changes else a).write(world.batch(0))
    yield a.weight, b.weight


@row()
def a_module_forward(world: World) -> Program:
    """``forward`` of a module class is compiled."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 8)

        @world.compile
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).detach()

    a, b = (world.module(Model()) for _ in range(2))
    yield a(world.batch(0))
    yield (b if world.changes else a)(world.batch(0))


@row()
def static_and_class_methods(world: World) -> Program:
    class Own:
        scale = 2.0

        @staticmethod
        @world.compile
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @classmethod
        @world.compile
        def scaled(cls, x: torch.Tensor) -> torch.Tensor:
            return x * cls.scale

    yield Own.double(world.batch(0)), Own().double(world.batch(0)), Own.scaled(world.batch(0))
    yield Own.double(world.batch(0)), Own().double(world.batch(0)), Own.scaled(world.batch(0))
    world.change(setattr, Own, "scale", 3.0)
    yield Own.double(world.batch(1)), Own().scaled(world.batch(0))


# Outside the step: what makes the loss of the output, with gradients.
OUTSIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda out: out.sum(),
    "loss": lambda out: nn.functional.cross_entropy(out, torch.tensor([0, 1, 2, 3]).to(out.device)),
    "twice": lambda out: out.pow(2).sum() + out.sum(),
}


@rows(OUTSIDE)
def forward_whose_loss_is_made_outside(world: World, loss_of: Callable) -> Program:
    """As after ``torch.compile(model)``."""
    model = mlp(world)
    optimizer = SGD(model.parameters(), lr=0.05)
    world.watch(model=model, optimizer=optimizer)
    compiled = world.compile(lambda x: model(x))
    for i in range(3):
        optimizer.zero_grad()
        loss = loss_of(compiled(world.batch(i)))
        loss.backward()
        if world.changes:
            optimizer.step()
        yield loss.detach(), model[0].weight.grad


@row()
def loss_of_a_step_differentiated_outside(world: World) -> Program:
    model = mlp(world)
    world.watch(model=model)
    loss_of = world.compile(lambda x: model(x).pow(2).mean())
    loss_of(world.batch(0)).backward()
    yield model[0].weight.grad
    if world.changes:
        model.zero_grad()
    loss_of(world.batch(1)).backward()
    yield model[0].weight.grad


@row()
def gradient_for_an_argument(world: World) -> Program:
    """The gradient goes through the compiled function to what came before it."""
    compiled = world.compile(lambda x: x.pow(2).sum(-1))
    for i in range(2):
        x = world.batch(i if world.changes else 0).requires_grad_()
        compiled(x * 3).sum().backward()
        yield x.grad


@row()
def one_gradient_of_two_results(world: World) -> Program:
    model = mlp(world)
    compiled = world.compile(lambda x: (model(x), x * 2, model(x).detach()))
    for i in range(2):
        model.zero_grad()
        out, double, detached = compiled(world.batch(i if world.changes else 0))
        (out * detached).sum().backward()
        yield model[0].weight.grad, double


@row()
def history_of_results(world: World) -> Program:
    """What has no history under torch has none here."""
    model = mlp(world)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(x), x * 2]

    compiled = world.compile(function)
    yield compiled(world.batch(0)), [r.requires_grad for r in compiled(world.batch(0))]
    x = world.batch(1).requires_grad_()
    if world.changes:
        yield compiled(x), [r.requires_grad for r in compiled(x)]
    else:
        yield compiled(world.batch(0)), None


@row()
def results_are_the_users(world: World) -> Program:
    """Results are written afterwards; neither the state nor the next result changes."""
    state = world.tensor(torch.zeros(4, 6))
    world.watch(state=state)
    step = world.compile(lambda x: [state.add_(x) * 1, x * 2])
    kept = []
    for i in range(4):
        results = step(world.batch(i))
        if world.changes:
            for result in results:
                result.mul_(5)
        kept.append(results)
        yield kept


@row()
def result_that_is_the_argument(world: World) -> Program:
    """The user writes to what came back, which is what went in."""
    step = world.compile(lambda x: [x, x * 2])
    x = world.batch(0)
    results = step(x)
    yield results, x, results[0] is x
    if world.changes:
        results[0].mul_(5)
    yield step(x), results, x


@row()
def result_that_is_state(world: World) -> Program:
    state = world.tensor(torch.zeros(4, 6))
    step = world.compile(lambda x: state.add_(x))
    first = step(world.batch(0))
    yield first, state
    if world.changes:
        first.mul_(5)
    yield step(world.batch(1)), first, state


@row()
def result_that_is_a_view_of_state(world: World) -> Program:
    state = world.tensor(torch.zeros(4, 6))

    def function(x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state[0]

    step = world.compile(function)
    first = step(world.batch(0))
    yield first, state
    second = step(world.batch(1))
    yield first, second, state
    if world.changes:
        second.mul_(5)
    yield step(world.batch(2)), state


@row()
def one_result_twice(world: World) -> Program:
    """Two results that are one tensor: a write shows in both."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        return [y, y, y[0], y.view(-1)]

    step = world.compile(function)
    for i in range(2):
        results = step(world.batch(i))
        if world.changes:
            results[0].add_(1)
        yield results


@row()
def a_b_a(world: World) -> Program:
    """Programs that were left come back."""
    model = mlp(world)
    optimizer, step = trainer(world, model, Adam)
    for i in range(6):
        if world.changes:
            model[0].requires_grad_(i % 3 != 1)
            optimizer.param_groups[0]["weight_decay"] = (0.0, 0.1)[i % 2]
        yield step(world.batch(i, (4 + 4 * (i % 2), 6)))


@row()
def a_step_that_raises_once(world: World) -> Program:
    model = mlp(world)
    optimizer = Adam(model.parameters(), lr=0.1)
    world.watch(model=model, optimizer=optimizer)
    fail = False

    def function(x: torch.Tensor) -> torch.Tensor:
        if fail:
            raise ZeroDivisionError("on purpose")
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = world.compile(function)
    yield step(world.batch(0))
    fail = world.changes
    try:
        yield step(world.batch(1))
    except ZeroDivisionError as error:
        yield str(error)
    fail = False
    yield step(world.batch(2))


@row()
def a_first_call_that_raises(world: World) -> Program:
    model = mlp(world)
    _, train = trainer(world, model, Adam)

    def function(x: torch.Tensor, fail: bool) -> torch.Tensor:
        if fail:
            raise ZeroDivisionError("on purpose")
        return x * 2

    step = world.compile(function)
    try:
        yield step(world.batch(0), world.changes)
    except ZeroDivisionError as error:
        yield str(error)
    yield step(world.batch(0), False), train(world.batch(1))


@row()
def an_argument_that_has_no_sense(world: World) -> Program:
    model = mlp(world)
    step = forward(world, model)
    yield step(world.batch(0))
    yield step(world.batch(0))
    try:
        yield step(world.batch(0, (4, 5) if world.changes else (4, 6)))
    except RuntimeError:
        yield "raised"
    yield step(world.batch(1))


@row()
def one_function_compiled_twice(world: World) -> Program:
    model = mlp(world)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    world.watch(model=model, optimizer=optimizer)

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    first, second = world.compile(function), world.compile(function)
    yield first(world.batch(0))
    yield second(world.batch(1))
    world.change(optimizer.param_groups[0].update, momentum=0.1)
    yield first(world.batch(2))
    yield second(world.batch(3))
    yield function(world.batch(4))
    yield first(world.batch(5))


@row()
def train_and_eval_steps_share_a_model(world: World) -> Program:
    model = world.module(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    _, train = trainer(world, model)
    evaluate = world.compile(torch.no_grad()(lambda x: model(x).pow(2).mean()))
    for i in range(3):
        model.train()
        loss = train(world.batch(i))
        if world.changes:
            model.eval()
        yield loss, evaluate(world.batch(7))


@row()
def eager_and_compiled_in_turns(world: World) -> Program:
    model = world.module(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    world.watch(model=model, optimizer=optimizer)

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = world.compile(function)
    for i, run in enumerate((step, function, step, step, function, step)):
        yield run(world.batch(i if world.changes else 0))


@row()
def step_with_the_graph_of_an_eager_forward_alive(world: World) -> Program:
    weight = world.parameter(numbers(1, 4, 6))
    world.watch(weight=weight)
    step = world.compile(lambda x: (weight * x).sum().backward())
    loss = (weight * world.batch(0)).pow(2).sum()
    step(world.batch(1))
    yield weight.grad
    if world.changes:
        loss.backward()
    yield weight.grad
    step(world.batch(2))
    yield weight.grad


@row()
def backward_after_a_compiled_write(world: World) -> Program:
    """torch finds that a saved tensor was written since."""
    weight = world.parameter(numbers(1, 4, 6))

    def function() -> None:
        with torch.no_grad():
            weight.mul_(2)

    step = world.compile(function)
    for _ in range(2):
        loss = weight.pow(2).sum()
        if world.changes:
            step()
        try:
            loss.backward()
            yield "went through", weight
        except RuntimeError:
            yield "raised", weight


@rows({"model": 0, "model_and_optimizer": 1})
def deep_copy_goes_on_alone(world: World, both: int) -> Program:
    model = mlp(world)
    optimizer, step = trainer(world, model, Adam)
    yield step(world.batch(0))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    if not both:
        twin_optimizer = Adam(twin.parameters(), lr=0.1)
    twin.zero_grad()
    world.watch(twin=twin, twin_optimizer=twin_optimizer)

    def function(x: torch.Tensor) -> torch.Tensor:
        twin_optimizer.zero_grad()
        loss = twin(x).pow(2).mean()
        loss.backward()
        twin_optimizer.step()
        return loss.detach()

    twin_step = world.compile(function)
    yield twin_step(world.batch(1))
    yield (step if world.changes else twin_step)(world.batch(2))
    yield twin_step(world.batch(3))


@row()
def tensors_made_where_others_were(world: World) -> Program:
    """The step's captured tensor dies, and another may get its address."""
    holder = SimpleNamespace()
    step = world.compile(lambda x: x * holder.weight)
    for i in range(5):
        holder.weight = world.tensor(numbers(i if world.changes else 0, 4, 6))
        results = step(world.batch(0))
        del holder.weight
        gc.collect(1)
        yield results


@row()
def models_made_where_others_were(world: World) -> Program:
    step = world.compile(lambda model, x: model(x).detach())
    for i in range(4):
        torch.manual_seed(i if world.changes else 0)
        model = mlp(world)
        results = step(model, world.batch(0))
        del model
        gc.collect(1)
        yield results


@row()
def optimizers_made_where_others_were(world: World) -> Program:
    weight = world.parameter(numbers(0, 4, 6))

    def function(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        weight.grad = None
        weight.pow(2).sum().backward()
        optimizer.step()
        return weight.detach() * 1

    step = world.compile(function)
    for i in range(4):
        optimizer = SGD([weight], lr=0.1 + (0.05 * i if world.changes else 0.0))
        results = step(optimizer)
        del optimizer
        gc.collect(1)
        yield results


@row()
def step_in_a_loop_over_layers(world: World) -> Program:
    """One compiled function for many modules of a class."""
    layers = [world.module(nn.Linear(6, 6)) for _ in range(3)]
    apply = world.compile(lambda layer, x: torch.tanh(layer(x)).detach())
    for i in range(2):
        x = world.batch(0)
        for layer in layers:
            x = apply(layer, x)
        yield x, i
        world.change(layers[1].weight.data.mul_, 3.0)


@row()
def partial_of_a_compiled_step(world: World) -> Program:
    step = functools.partial(world.compile(lambda by, x: x * by), 2.0)
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        step = functools.partial(step.func, 3.0)
    yield step(world.batch(0))


@row()
def closures_of_one_code(world: World) -> Program:
    """Two functions with one code object and different cells."""

    def make(by: float, weight: torch.Tensor) -> Callable[..., Any]:
        return world.compile(lambda x: x * by + weight)

    first = make(2.0, world.batch(1))
    second = make(3.0, world.batch(2)) if world.changes else first
    yield first(world.batch(0)), second(world.batch(0))
    yield second(world.batch(3)), first(world.batch(3))


@row()
def vmap_and_grad_around_a_step(world: World) -> Program:
    """``torch.func.grad`` of a compiled function."""
    step = world.compile(lambda x: (x * x).sum())
    yield torch.func.grad(step)(world.batch(0))
    yield torch.func.grad(step)(world.batch(1 if world.changes else 0))


@row()
def state_dict_taken_between(world: World) -> Program:
    """What is saved doesn't change with the next step, or does as torch's does."""
    model = mlp(world)
    optimizer, step = trainer(world, model, Adam)
    yield step(world.batch(0))
    saved, clones = model.state_dict(), copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict()["state"][0]["exp_avg"])
    if world.changes:
        step(world.batch(1))
    yield list(saved.values()), list(clones.values()), state
    step(world.batch(2))
    yield list(saved.values()), list(clones.values()), state
