"""What the step's own Python does besides computing: modes, counters, lists, attributes.

Every call does it under torch. Random numbers of the host are drawn anew in every call, too.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler

from tests.compilation.changes._table import Program, mlp, row, rows
from tests.compilation.changes._world import World, numbers

COUNT = 0
FLAG = "on"


@row()
def mode_set_in_the_step(world: World) -> Program:
    model = world.module(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)))
    world.watch(model=model)

    def function(x: torch.Tensor) -> torch.Tensor:
        model.eval()
        out = model(x).detach()
        if world.changes:
            model.train()
        return out

    step = world.compile(function)
    yield step(world.batch(0)), model.training
    yield model(world.batch(1)).detach()
    yield step(world.batch(2)), model.training


@row()
def mode_toggled_in_the_step(world: World) -> Program:
    model = world.module(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)))

    def function(x: torch.Tensor) -> torch.Tensor:
        if world.changes:
            model.train(not model.training)
        return model(x).detach()

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i)), model.training, [b.clone() for b in model.buffers()]


@row()
def train_then_eval_in_one_step(world: World) -> Program:
    model = world.module(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)))

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        model.train()
        out = model(x).detach()
        if world.changes:
            model.eval()
        return [out, model(x).detach()]

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), model.training


@row()
def attribute_counted(world: World) -> Program:
    holder = SimpleNamespace(count=0)

    def function(x: torch.Tensor) -> torch.Tensor:
        if world.changes:
            holder.count += 1
        return x * holder.count

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), holder


@row()
def attribute_of_a_module_counted(world: World) -> Program:
    class Counting(nn.Module):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += world.changes
            return x * 2

    model = Counting()
    step = world.compile(lambda x: model(x))
    for i in range(3):
        yield step(world.batch(i)), model.count


@row()
def nonlocal_counted(world: World) -> Program:
    count = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += world.changes
        return x * 2

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), count


@row()
def global_counted(world: World) -> Program:
    global COUNT
    COUNT = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        global COUNT
        COUNT += world.changes
        return x * 2

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), COUNT


@row()
def counter_decides(world: World) -> Program:
    """Gradient accumulation, as it is often written."""
    weight = world.parameter(numbers(1, 4, 6))
    world.watch(weight=weight)
    holder = SimpleNamespace(count=0)

    def function(x: torch.Tensor) -> torch.Tensor:
        (weight * x).sum().backward()
        holder.count += 1
        if world.changes and holder.count % 2 == 0:
            with torch.no_grad():
                weight.sub_(weight.grad)
            weight.grad = None
        return weight.detach() * 1

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i))


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], Any]]] = {
    "list_append": (list, lambda o, loss: o.append(loss)),
    "list_append_number": (list, lambda o, loss: o.append(len(o))),
    "list_extend": (list, lambda o, loss: o.extend([loss, 1])),
    "list_item": (lambda: [0], lambda o, loss: o.__setitem__(0, loss)),
    "list_pop": (lambda: [1, 2, 3, 4], lambda o, loss: o.pop()),
    "dict_item": (dict, lambda o, loss: o.update({len(o): loss})),
    "dict_number": (dict, lambda o, loss: o.update(calls=o.get("calls", 0) + 1)),
    "dict_deleted": (lambda: dict.fromkeys(range(9), 0), lambda o, loss: o.pop(max(o))),
    "dict_same_key": (dict, lambda o, loss: o.update(loss=loss)),
    "attribute": (SimpleNamespace, lambda o, loss: setattr(o, "last", loss)),
    "attribute_summed": (
        lambda: SimpleNamespace(total=0.0),
        lambda o, loss: setattr(o, "total", o.total + loss),
    ),
}


@rows(CONTAINERS)
def left_behind(world: World, case: tuple[Callable, Callable]) -> Program:
    """The result is put in a list, a dict or an attribute that outlives the step."""
    make, leave = case
    holder = make()

    def function(x: torch.Tensor) -> torch.Tensor:
        loss = x.pow(2).sum()
        if world.changes:
            leave(holder, loss)
        return loss * 2

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i)), holder


class _Flagged:
    flag: Any = False


OWNERS: dict[str, Callable[[World], Any]] = {
    "namespace": lambda world: SimpleNamespace(),
    "object": lambda world: _Flagged(),
    "class": lambda world: type("Flags", (), {}),
    "function": lambda world: lambda: None,
    "module": lambda world: world.module(nn.Linear(6, 4)),
    "parameter": lambda world: world.parameter(numbers(1, 4, 6)),
    "tensor": lambda world: world.tensor(numbers(1, 4, 6), None),
}


@rows({f"{name}-{value}": (make, value) for name, make in OWNERS.items() for value in (True, "on")})
def flag_put_where_it_is(world: World, case: tuple[Callable[[World], Any], Any]) -> Program:
    """The step only assigns it, and the first time it is there already. The user takes it away."""
    make, value = case
    owner = make(world)
    owner.flag = value

    def function(x: torch.Tensor) -> torch.Tensor:
        if world.changes:
            owner.flag = value
        return x * 2

    step = world.compile(function)
    for i, change in enumerate((None, None, "other", "gone", "other", None)):
        if change == "other":
            owner.flag = None
        elif change == "gone" and "flag" in vars(owner):
            del owner.flag
        yield step(world.batch(i)), vars(owner).get("flag", "none")
    world.traced_at_most(3, step)


@row()
def attribute_that_a_branch_would_assign(world: World) -> Program:
    """What the user puts there stays, and isn't asked about again and again."""
    owner = SimpleNamespace(number=0, name="")

    def function(x: torch.Tensor, resets: bool) -> torch.Tensor:
        if resets:
            owner.number = -1
            owner.name = "reset"
        return x * 2

    step = world.compile(function)
    for i in range(7):
        owner.number, owner.name = i * world.changes, f"call {i}"
        yield step(world.batch(i), world.changes and i == 5), owner.number, owner.name
    world.traced_at_most(3, step)


@row()
def global_put_where_it_is(world: World) -> Program:
    global FLAG
    FLAG = "on"

    def function(x: torch.Tensor) -> torch.Tensor:
        global FLAG
        if world.changes:
            FLAG = "on"
        return x * 2

    step = world.compile(function)
    for i in range(5):
        if i == 2:
            FLAG = "off"
        yield step(world.batch(i)), FLAG


@row()
def buffer_replaced_in_forward(world: World) -> Program:
    """A running mean that is a new tensor in every call."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", world.tensor(torch.zeros(6), None))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if world.changes:
                self.mean = self.mean * 0.9 + x.mean(0) * 0.1
            return x - self.mean

    model = Mean()
    world.watch(model=model)
    step = world.compile(lambda x: model(x))
    for i in range(4):
        yield step(world.batch(i)), model.mean


@row()
def cache_made_in_the_first_call(world: World) -> Program:
    """As rotary embeddings do; then the user drops it, or puts another in its place."""

    class Cached(nn.Module):
        cache: torch.Tensor | None = None
        base = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.cache is None:
                self.cache = torch.ones(6, device=x.device) * self.base
            return x * self.cache

    model = Cached()
    step = world.compile(lambda x: model(x))
    yield step(world.batch(0)), model.cache
    yield step(world.batch(1)), model.cache
    if world.changes:
        model.cache, model.base = None, 3.0
    yield step(world.batch(2)), model.cache
    world.change(setattr, model, "cache", world.tensor(torch.full((6,), 5.0), None))
    yield step(world.batch(3)), model.cache


@row()
def hidden_state_kept(world: World) -> Program:
    """A recurrent state that the object keeps between calls."""
    holder = SimpleNamespace(state=None)
    weight = world.parameter(numbers(1, 4, 6))

    def function(x: torch.Tensor) -> torch.Tensor:
        state = x if holder.state is None else torch.tanh(holder.state + x * weight)
        holder.state = state.detach()
        return holder.state * 2

    step = world.compile(function)
    for i in range(2):
        yield step(world.batch(i)), holder
    world.change(setattr, holder, "state", None)
    for i in range(2):
        yield step(world.batch(i)), holder


@row()
def rebound_in_the_step(world: World) -> Program:
    """An exponential moving average that the step binds anew."""
    average = world.tensor(torch.zeros(4, 6))

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal average
        if world.changes:
            average = average * 0.5 + x
        return average * 1

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i)), average


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (i + 1)),
}


@rows(SCHEDULERS)
def scheduler_in_the_step(world: World, make: Callable) -> Program:
    model = mlp(world)
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = make(optimizer)
    world.watch(model=model, optimizer=optimizer)

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        if world.changes:
            scheduler.step()
        return loss.detach()

    step = world.compile(function)
    for _ in range(4):
        yield step(world.batch(0)), scheduler.last_epoch, optimizer.param_groups[0]["lr"]


@row()
def setting_written_in_the_step(world: World) -> Program:
    model = mlp(world)
    optimizer = Adam(model.parameters(), lr=0.1)

    def function(x: torch.Tensor) -> torch.Tensor:
        if world.changes:
            optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = world.compile(function)
    for _ in range(4):
        yield step(world.batch(0)), optimizer.param_groups[0]["lr"]


ZEROING: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "none_last": lambda m, o: o.zero_grad(),
    "zeros": lambda m, o: o.zero_grad(set_to_none=False),
    "of_the_model": lambda m, o: m.zero_grad(),
    "of_the_model_zeros": lambda m, o: m.zero_grad(set_to_none=False),
    "deleted": lambda m, o: [setattr(p, "grad", None) for p in m.parameters()],
    "one": lambda m, o: m[0].zero_grad(),
}


@rows(ZEROING)
def gradients_zeroed_in_the_step(world: World, zero: Callable) -> Program:
    model = mlp(world)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    world.watch(model=model, optimizer=optimizer)

    def function(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        if world.changes:
            zero(model, optimizer)
        return loss.detach()

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(0)), i


@row()
def requires_grad_set_in_the_step(world: World) -> Program:
    """A GAN's step freezes the discriminator for a while."""
    first, second = world.parameter(numbers(1, 4, 6)), world.parameter(numbers(2, 4, 6))
    world.watch(first=first, second=second)

    def function(x: torch.Tensor) -> list:
        first.grad = second.grad = None
        if world.changes:
            second.requires_grad_(False)
        (first * second * x).sum().backward()
        second.requires_grad_(True)
        return [first.grad * 1, second.grad is None]

    step = world.compile(function)
    yield step(world.batch(0))
    yield step(world.batch(1))


def _switch(module: nn.Module, requires_grad: bool) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(requires_grad)


FROZEN: dict[str, tuple[Callable, Callable, Callable]] = {
    "frozen_last": (lambda d: _switch(d, True), lambda d: _switch(d, False), lambda d: None),
    "back": (lambda d: None, lambda d: d.requires_grad_(False), lambda d: d.requires_grad_(True)),
    "in_part": (
        lambda d: d[0].requires_grad_(True),
        lambda d: d[0].requires_grad_(False),
        lambda d: d[2].bias.requires_grad_(False),
    ),
}


@rows(FROZEN, unseen=True)
def frozen_in_the_step(world: World, case: tuple[Callable, Callable, Callable]) -> Program:
    """A GAN's step: the discriminator learns, then the generator, through it."""
    learns, rests, last = case
    generator, discriminator = (
        mlp(world),
        world.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))),
    )
    optimizers = [Adam(m.parameters(), lr=0.01) for m in (generator, discriminator)]
    world.watch(generator=generator, discriminator=discriminator, optimizer=optimizers[1])

    def function(x: torch.Tensor, real: torch.Tensor) -> list[torch.Tensor]:
        learns(discriminator)
        optimizers[1].zero_grad()
        fake = discriminator(generator(x).detach()).mean() - discriminator(real).mean()
        fake.backward()
        optimizers[1].step()
        rests(discriminator)
        optimizers[0].zero_grad()
        loss = -discriminator(generator(x)).mean()
        loss.backward()
        optimizers[0].step()
        last(discriminator)
        state = [p.requires_grad for p in discriminator.parameters()]
        return [fake.detach(), loss.detach(), *map(torch.tensor, state)]

    step = world.compile(function)
    for i in range(6):
        yield step(world.batch(i), world.batch(i + 9, (4, 4)))
    world.traced_at_most(2, step)


@row()
def argument_made_a_leaf_in_the_step(world: World) -> Program:
    """A gradient penalty: each call's argument requires grad afterwards, and has one."""
    weight = world.parameter(numbers(1, 4, 6))

    def function(x: torch.Tensor) -> torch.Tensor:
        if world.changes:
            x.requires_grad_()
        (x * x * weight).sum().backward()
        weight.grad = None
        return x.detach() * 2

    step = world.compile(function)
    for i in range(3):
        x = world.batch(i)
        yield step(x), x, x.requires_grad, x.grad
    world.traced_at_most(1, step)


@row(unseen=True)
def frozen_by_a_step_that_raises(world: World) -> Program:
    model = mlp(world)
    world.watch(model=model)

    def function(x: torch.Tensor, bad: bool) -> torch.Tensor:
        model.requires_grad_(False)
        out = model(x)
        if bad:
            raise ValueError("as asked for")
        model.requires_grad_(True)
        return out

    step = world.compile(function)
    for i in range(3):
        world.fail(step, world.batch(i), True)
        yield step(world.batch(i), False)


@row()
def hook_registered_in_the_step(world: World) -> Program:
    """Every call adds one more, under torch."""
    weight = world.parameter(numbers(1, 4, 6))

    def function(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        if world.changes:
            weight.register_hook(lambda grad: grad * 2)
        (weight * x).sum().backward()
        return weight.grad * 1

    step = world.compile(function)
    for _ in range(3):
        yield step(world.batch(0))


@row()
def hook_for_the_time_of_the_step(world: World) -> Program:
    model = mlp(world)
    seen: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        handle = model[0].register_forward_hook(lambda m, i, output: seen.append(output.detach()))
        seen.clear()
        out = model(x).detach()
        handle.remove()
        return [out, *seen]

    step = world.compile(function)
    yield step(world.batch(0))
    world.change(model[0].weight.data.mul_, 2.0)
    yield step(world.batch(0))


DRAWS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "iterator": lambda x, it: x * next(it),
    "random": lambda x, it: x * random.random(),
    "choice": lambda x, it: x[random.randrange(4)],
    "numpy": lambda x, it: x * float(np.random.rand()),
    "numpy_generator": lambda x, it: x * float(it.generator.random()),
}


class Counter:
    def __init__(self, moving: bool) -> None:
        self.counter = itertools.count() if moving else itertools.repeat(0)
        self.generator = np.random.default_rng(0)

    def __next__(self) -> int:
        return next(self.counter)


@rows(DRAWS)
def drawn_on_the_host(world: World, draw: Callable) -> Program:
    random.seed(0)
    np.random.seed(0)
    source = Counter(world.changes)

    def again() -> None:
        random.seed(0)
        np.random.seed(0)
        source.generator = np.random.default_rng(0)

    step = world.compile(lambda x: draw(x, source))
    for _ in range(4):
        if not world.changes:
            again()
        yield step(world.batch(0))


@row()
def prepared_iterator(world: World) -> Program:
    """The step takes its own batches."""
    batches = [world.batch(i) for i in range(4)]
    loader = iter(batches) if world.changes else itertools.repeat(batches[0])
    step = world.compile(lambda: next(loader) * 2)
    for _ in range(4):
        yield step()


@row()
def class_attribute_written_in_the_step(world: World) -> Program:
    own = type("Own", (), {"count": 0})

    def function(x: torch.Tensor) -> torch.Tensor:
        own.count += world.changes
        return x * own.count

    step = world.compile(function)
    for _ in range(3):
        yield step(world.batch(0)), own.count


@row()
def cpu_tensor_appended(world: World) -> Program:
    log: list[float] = []

    def function(x: torch.Tensor, epoch: int) -> torch.Tensor:
        if world.changes:
            log.append(epoch * 1.0)
        return x * epoch

    step = world.compile(function)
    for i in (1, 2, 1, 2):
        yield step(world.batch(0), i), log


LEAVING: dict[str, Callable[[SimpleNamespace], None]] = {
    "attribute": lambda held: delattr(held, "scale"),
    "through_vars": lambda held: vars(held).pop("scale"),
}


@rows(LEAVING)
def number_removed_in_every_call(world: World, remove: Callable) -> Program:
    """The next calls find another one there, which is an input by then."""
    held = SimpleNamespace(scale=2.0, kept=1.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        scale = held.scale
        remove(held)
        return x * scale * held.kept

    step = world.compile(function)
    for number in range(4):
        yield step(world.batch(0)), sorted(vars(held))
        held.scale = 3.0 + number
        world.change(setattr, held, "kept", 2.0 + number)


@row()
def cached_property_made_again(world: World) -> Program:
    """`functools.cached_property` puts the attribute there itself, and the user takes it away."""

    class Holder:
        k, made = 2.0, 0

        @functools.cached_property
        def scale(self) -> float:
            self.made += 1
            return self.k * 10

    holder = Holder()
    step = world.compile(lambda x: x * holder.scale)
    yield step(world.batch(0)), holder.made
    for k in (3.0, 4.0):
        holder.k = k
        yield step(world.batch(0)), holder.made
        world.change(delattr, holder, "scale")
        yield step(world.batch(0)), holder.made, "scale" in vars(holder)


@row()
def counted_in_each_thread(world: World) -> Program:
    """A ``threading.local``: each thread's calls count its own."""
    local = threading.local()

    def function(x: torch.Tensor) -> torch.Tensor:
        local.n = getattr(local, "n", 0) + 1
        return x * local.n

    step, x = world.compile(function), world.batch(0)
    yield step(x), step(x), local.n
    for _ in range(2):
        found: list[Any] = []

        def calls(found: list[Any] = found) -> None:
            found.extend((step(x), local.n) for _ in range(3))

        in_a_thread = threading.Thread(target=calls)
        world.change(in_a_thread.start)
        world.change(in_a_thread.join)
        yield found, step(x), local.n
