"""What a step takes of CPU tensors besides their values: sizes, text, memory, gradients, flags;
what it writes to their memory; and values that Python takes for equal."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.compilation.changes._table import Program, row, rows
from tests.compilation.changes._world import World

Use = Callable[[torch.Tensor, torch.Tensor], Any]


def T(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def of_values(world: World, use: Use, values: tuple[torch.Tensor, ...], **at_most: int) -> Program:
    """The step with a captured tensor and with an argument, of other values in each call."""
    held = values[0].clone()
    step = world.compile(lambda x: use(x, held))
    of_argument = world.compile(use)
    for value in (values[0], *values):
        world.change(held.copy_, value)
        yield step(world.batch(0)), of_argument(world.batch(0), value if world.changes else held)
    for name, count in at_most.items():
        getattr(world, name)(count, step)


SIZES: dict[str, tuple[Use, tuple[torch.Tensor, ...]]] = {
    "masked": (lambda x, t: x * len(t[t > 0]), (T(0, 1), T(1, 1))),
    "masked_select": (lambda x, t: x * t.masked_select(t > 0).shape[0], (T(0, 1), T(1, 1))),
    "nonzero": (lambda x, t: x * t.nonzero().numel(), (T(0, 1), T(1, 1))),
    "nonzero_flattened": (lambda x, t: x + (t.nonzero().flatten() + 1).sum(), (T(0, 1), T(1, 1))),
    "nonzero_loop": (
        lambda x, t: sum((x + i.item() for i in t.nonzero()), x),
        (T(1, 1), T(0, 1), T(0, 0)),
    ),
    "where": (lambda x, t: x.sum(0)[torch.where(t > 0)[0].to(x.device)], (T(0, 1), T(1, 1))),
    "unique": (lambda x, t: x * t.unique().numel(), (T(0, 1), T(1, 1))),
    "bincount": (lambda x, t: x * torch.bincount(t.long()).numel(), (T(0, 1), T(0, 4))),
    "one_hot": (lambda x, t: x + F.one_hot(t.long()).numel(), (T(0, 1), T(0, 2), T(3, 0))),
    "repeat_interleave": (
        lambda x, t: x * len(torch.arange(2.0).repeat_interleave(t.long())),
        (T(1, 1), T(1, 3)),
    ),
    "packed": (
        lambda x, t: x * len(nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2), t.long())[1]),
        (T(3, 1), T(2, 1)),
    ),
    "tensor_split": (
        lambda x, t: x + torch.arange(5).tensor_split(t.long())[0].sum(),
        (T(1, 2), T(3, 4)),
    ),
}


@rows(SIZES)
def size_that_depends_on_values(
    world: World, case: tuple[Use, tuple[torch.Tensor, ...]]
) -> Program:
    return of_values(world, *case)


def printed(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    print(f"{t}")
    print("at", t)
    logging.getLogger(__name__).warning("at %s", t)
    return x * t.sum()


@rows(
    {
        "mean": lambda x, t: x * t[t > 0].mean(),
        "sum": lambda x, t: x * t.masked_select(t > 0).sum(),
        "printed": printed,
    }
)
def no_program_for_each(world: World, use: Use) -> Program:
    """Neither of a size that the step doesn't go by, nor of what is only printed."""
    return of_values(world, use, (T(0, 1), T(2, 1), T(3, 0)), traced_at_most=1)


def stored(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return x * t.storage()[1]


LOOKS: dict[str, Use] = {
    "equal": lambda x, t: x * (2 if torch.equal(t, T(1, 2)) else 3),
    "allclose": lambda x, t: x * (2 if torch.allclose(t, T(1, 2)) else 3),
    "repr": lambda x, t: x * len(repr(t)),
    "format": lambda x, t: x * len(f"{t}"),
    "storage": stored,
    "untyped_storage": lambda x, t: x * t.untyped_storage()[7],
    "dlpack": lambda x, t: x * float(np.from_dlpack(t)[1]),
    "pickle": lambda x, t: x * pickle.loads(pickle.dumps(t))[1].item(),
    "tensor_of_list": lambda x, t: x * torch.tensor([t[0], 2.0, t[1]]).sum(),
    "tensor_with_a_bool": lambda x, t: x * torch.tensor([t[0], True, t[1]]).sum(),
    "tensor_of_numpys": lambda x, t: x * torch.tensor([t[0], np.float32(2), t[1]]).sum(),
    "tensor_on_the_devices": lambda x, t: x * torch.tensor([t[1], 2j], device=x.device).real.sum(),
    "as_tensor_of_rows": lambda x, t: x * torch.as_tensor([[t[0], t[1]], [1.0, 2.0]]).sum(),
    "new_tensor": lambda x, t: x * t.new_tensor([t[0] * 2, t[1]]).sum(),
    "FloatTensor": lambda x, t: x * torch.FloatTensor([t[0], t[1]]).sum(),
    "asarray": lambda x, t: x * torch.asarray([t[0], t[1]]).sum(),
}


@rows(LOOKS)
def values_taken_without_an_operation(world: World, use: Use) -> Program:
    return of_values(world, use, (T(1, 2), T(1, 30), T(5, 30.25)))


def with_other_memory(t: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(2)
    made.data = t * 2
    return made


MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "parameter": lambda t: nn.Parameter(t * 2, requires_grad=False),
    "parameter_of_it": lambda t: nn.Parameter(t, requires_grad=False)[1:],
    "subclass": lambda t: (t * 2).as_subclass(nn.Buffer).as_subclass(torch.Tensor),
    "subclass_of_it": lambda t: t.as_subclass(torch.Tensor),
    "storage": lambda t: torch.empty(0).set_((t * 2).untyped_storage()),
    "data": with_other_memory,
    "dlpack": lambda t: torch.from_dlpack(t * 2),
}


@rows(MADE)
def tensor_around_the_memory_of_another(world: World, make: Callable) -> Program:
    return of_values(world, lambda x, t: x * make(t).detach().sum(), (T(1, 2), T(1, 3), T(5, 4)))


@row()
def parameter_that_the_step_makes_and_writes(world: World) -> Program:
    def use(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        made = nn.Parameter(t.clone())
        with torch.no_grad():
            made.mul_(3)
        return x * made.detach().sum()

    return of_values(world, use, (T(1, 2), T(1, 3)))


def own(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable:
    def written(t: torch.Tensor) -> torch.Tensor:
        made = t * 2
        write(made, t)
        return made + made.sum()

    return written


def behind_from_numpy(t: torch.Tensor) -> torch.Tensor:
    array = np.zeros(2, np.float32)
    shown = torch.from_numpy(array)
    before = shown + t
    array += 1
    return before + shown * t


WRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "item": own(lambda made, t: made.numpy().__setitem__(0, 9.0)),
    "copyto": own(lambda made, t: np.copyto(made.numpy(), t.numpy())),
    "out": own(lambda made, t: np.multiply(t.numpy(), 3, out=made.numpy())),
    "apply_": own(lambda made, t: made.apply_(lambda v: v * v + 1)),
    "a_view": own(lambda made, t: made[1:].numpy().fill(4.0)),
    "behind_from_numpy": behind_from_numpy,
}


@rows(WRITTEN)
def own_tensor_written_by_numpy(world: World, make: Callable) -> Program:
    return of_values(world, lambda x, t: x * make(t).sum(), (T(1, 2), T(1, 3), T(5, 4)))


OUTSIDE: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda t: t.numpy().__setitem__(0, 9.0),
    "foreach": lambda t: torch._foreach_add_([t], 1.0),
    "second_out": lambda t: torch.aminmax(
        torch.stack([t, t * 2 + 1]), dim=0, out=(torch.empty(2), t)
    ),
    "view": lambda t: t[1].add_(1),
    "view_from_before": lambda t: (lambda part: (t.add_(1), part.mul_(2)))(t[1]),
}


@row()
def own_tensor_written_by_numpy_between_two_uses(world: World) -> Program:
    def use(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        made = t * 2
        first = x * made.sum() + made[0]
        shown = made.numpy()
        shown += 1
        second = first * made[0]
        made.mul_(2)
        return second * made[1] + float(shown[0])

    return of_values(world, use, (T(1, 2), T(1, 3), T(5, 4)))


@rows(OUTSIDE)
def written_on_the_host(world: World, write: Callable) -> Program:
    t = T(1.0, 2.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        before = x * t.sum()
        if world.changes:
            write(t)
        return before + t.sum()

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), t.clone()


@rows(
    {
        "batch": (lambda: nn.BatchNorm1d(2, affine=False), (3, 2)),
        "instance": (lambda: nn.InstanceNorm1d(2, track_running_stats=True), (1, 2, 4)),
    }
)
def running_statistics(world: World, case: tuple[Callable, tuple[int, ...]]) -> Program:
    """Which C++ updates without saying so: once in each call, also in one that traces again."""
    make, shape = case
    norm, features = make(), torch.arange(24.0)[: torch.Size(shape).numel()].reshape(shape)
    world.watch(norm=norm)
    step = world.compile(lambda x: x * norm(features).abs().sum() + norm.running_mean.sum())
    for _ in range(2):
        yield step(world.batch(0))
        world.change(features.mul_, 2)
    world.change(setattr, norm, "momentum", 0.5)
    yield step(world.batch(0))
    world.change(norm.eval)
    yield step(world.batch(0))


@row()
def gradient_on_the_host(world: World) -> Program:
    """Accumulated in the step, cleared outside, and its values read."""
    model, features = nn.Linear(2, 1), torch.ones(1, 2)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.5)
    world.watch(model=model)

    def function(x: torch.Tensor) -> torch.Tensor:
        model(features).sum().backward()
        return x * model.weight.grad.sum()

    step = world.compile(function)
    for _ in range(3):
        yield step(world.batch(0))
    world.change(model.zero_grad)
    yield step(world.batch(0))
    world.change(features.mul_, 2)
    yield step(world.batch(0))


def logged(x: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return x / (1 + leaf.grad.norm()) if leaf.grad is not None else x


def asked(function: Callable[[torch.Tensor], Any]) -> Use:
    return lambda x, t: x * (2 if function(t) else 3)


@rows({"captured": False, "argument": True})
def gradient_read_on_the_host(world: World, given: bool) -> Program:
    leaf = torch.ones(2, requires_grad=True)

    def train(by: float) -> None:
        leaf.grad = None
        (leaf * by).sum().backward()

    step = world.compile(logged if given else lambda x: logged(x, leaf))
    arguments = (leaf,) if given else ()
    yield step(world.batch(0), *arguments)
    for by in (2.0, 3.0, 4.0):
        world.change(train, by)
        yield step(world.batch(0), *arguments)
    world.traced_at_most(2, step)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
    "adam": torch.optim.Adam,
}


@rows(OPTIMIZERS)
def optimizer_on_the_host(world: World, make: Callable) -> Program:
    alpha = nn.Parameter(torch.zeros(1))
    optimizer = make([alpha], lr=0.1)
    world.watch(alpha=alpha)

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        (alpha - 3).square().sum().backward()
        optimizer.step()
        return x * alpha.detach()

    step = world.compile(function)
    for _ in range(3):
        yield step(world.batch(0))
    world.change(optimizer.param_groups[0].update, lr=0.01)
    yield step(world.batch(0))
    world.change(lambda: alpha.data.fill_(1.0))
    yield step(world.batch(0))


def transposed() -> tuple[torch.Tensor, Callable[[], Any]]:
    t = torch.ones(2, 2)
    return t, t.t_


def toggled() -> tuple[torch.Tensor, Callable[[], Any]]:
    t = torch.ones(2)
    return t, t.requires_grad_


class Marked(torch.Tensor):
    """One of the user's."""


def marked() -> tuple[torch.Tensor, Callable[[], Any]]:
    t = torch.ones(2)
    return t, lambda: setattr(t, "__class__", Marked)


FLAGS: dict[str, tuple[Callable[[], tuple[torch.Tensor, Callable[[], Any]]], Use]] = {
    "stride": (transposed, asked(lambda t: t.stride() == (2, 1))),
    "class": (marked, asked(lambda t: type(t) is torch.Tensor)),
    "history": (toggled, asked(lambda t: (t * 2).grad_fn is None)),
    "grad_fn": (toggled, asked(lambda t: (t * 2).is_leaf)),
}


@rows(FLAGS)
def flag_of_a_captured(world: World, case: tuple[Callable, Use]) -> Program:
    make, use = case
    t, change = make()
    step = world.compile(lambda x: use(x, t))
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(change)
    yield step(world.batch(0))


BASE = torch.tensor([1 + 2j, 3 - 1j])
LEAF = torch.ones(2, requires_grad=True)
OTHERS: dict[str, tuple[torch.Tensor, torch.Tensor, Use]] = {
    "offset": (BASE[:1], BASE[1:], asked(lambda t: t.storage_offset())),
    "conjugate": (BASE[:], BASE.conj(), asked(lambda t: t.is_conj())),
    "leaf": (LEAF, LEAF * 1, asked(lambda t: t.is_leaf)),
    "history": (LEAF, LEAF * 1, asked(lambda t: t.grad_fn is None)),
}


@rows(OTHERS)
def flag_of_an_argument(world: World, case: tuple[torch.Tensor, torch.Tensor, Use]) -> Program:
    one, other, use = case
    step = world.compile(use)
    for t in (one, other, one):
        yield step(world.batch(0), t if world.changes else one)


@row()
def result_with_a_history(world: World) -> Program:
    t = torch.ones(2, requires_grad=True)
    step = world.compile(lambda x: (x + 1, (t * 3).sum()))
    for i in range(2):
        y, loss = step(world.batch(0))
        yield y, loss.detach(), loss.requires_grad
        (loss * (i + 1 if world.changes else 1)).backward()
        yield t.grad


@row()
def aliases_of_one_array(world: World) -> Program:
    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return x * b.sum()

    step = world.compile(function)
    a, b = torch.ones(3), torch.ones(3)
    yield step(world.batch(0), a, b), a, b
    shown = torch.from_numpy(a.numpy())
    yield step(world.batch(0), a, shown if world.changes else b), a, b


ROW = np.array([(1.5, 2)], dtype=[("a", "f8"), ("b", "i8")])[0]
OTHER = np.array([(1.5, 2)], dtype=[("b", "f8"), ("a", "i8")])[0]
HOUR = np.timedelta64(1, "h")
FLOATS = memoryview(np.array([1.5, 2.5], "f4"))
EQUAL: dict[str, tuple[Any, Any, Callable[[torch.Tensor, Any], Any]]] = {
    "range": (range(0, 3, 2), range(0, 4, 2), lambda x, v: x * v.stop),
    "range_in_a_tuple": ((range(0, 3, 2),), (range(0, 4, 2),), lambda x, v: x * v[0].stop),
    "slice": (slice(0, 1), slice(0, True), lambda x, v: x * (2 if v.stop is True else 3)),
    "complex": (complex(-1, 0.0), complex(-1, -0.0), lambda x, v: x * float(np.angle(v))),
    "timedelta": (HOUR, np.timedelta64(60, "m"), lambda x, v: x * int(v.astype(int))),
    "row_of_an_array": (ROW, OTHER, lambda x, v: x * float(v["a"])),
    "memoryview": (FLOATS, FLOATS.cast("B").cast("i"), lambda x, v: x * (v[0] % 7)),
}


@rows(EQUAL)
def values_that_are_equal(world: World, case: tuple[Any, Any, Callable]) -> Program:
    one, other, use = case
    of_argument, held = world.compile(use), [one]
    of_captured = world.compile(lambda x: use(x, held[0]))
    for value in (one, other, one):
        world.change(held.__setitem__, 0, value)
        now = held[0]
        yield of_argument(world.batch(0), now), of_captured(world.batch(0))
