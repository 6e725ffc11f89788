"""Changes of CPU tensors, and of torch's global state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compilation.changes._table import Program, row, rows
from tests.compilation.changes._world import World, numbers

USES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "directly": lambda x, s: x * s,
    "multiplied": lambda x, s: x * (s * 2),
    "added": lambda x, s: x * (s + 1),
    "item": lambda x, s: x * s.item(),
    "float": lambda x, s: x * float(s),
    "int": lambda x, s: x * int(s),
    "if": lambda x, s: x * 2 if s > 1.5 else x,
    "index": lambda x, s: x[s.long()],
    "index_plus": lambda x, s: x[s.long() + 1],
    "slice": lambda x, s: x[: int(s)],
    "tolist": lambda x, s: x * s.tolist(),
    "numpy": lambda x, s: x * float(s.numpy()),
    "tensor_of": lambda x, s: x * torch.tensor(float(s)),
    "clone": lambda x, s: x * s.clone(),
    "view": lambda x, s: x * s.view(1),
    "stack": lambda x, s: x * torch.stack([s, s]).sum(),
    "written_copy": lambda x, s: x * torch.zeros(()).copy_(s),
    "to_float": lambda x, s: x * s.double().float(),
    "where": lambda x, s: torch.where(s > 1.5, x, -x),
    "alpha": lambda x, s: torch.add(x, x, alpha=s.item()),
    "fill": lambda x, s: torch.zeros_like(x).fill_(s),
    "setitem": lambda x, s: torch.zeros(6).index_fill_(0, torch.tensor([0]), s.item()) * x,
    "compared": lambda x, s: x * bool((s == 1).all()),
    "size": lambda x, s: x * torch.zeros(int(s)).numel(),
}


@rows(USES)
def cpu_tensor_in_place(world: World, use: Callable) -> Program:
    scale = torch.tensor(1.0)
    step = world.compile(lambda x: use(x, scale))
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(scale.fill_, 2.0)
    yield step(world.batch(0))


@rows({n: USES[n] for n in ("directly", "multiplied", "item", "index", "index_plus", "if")})
def cpu_tensor_rebound(world: World, use: Callable) -> Program:
    scale = torch.tensor(1.0)
    step = world.compile(lambda x: use(x, scale))
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        scale = torch.tensor(2.0)
    yield step(world.batch(0))


@rows({n: USES[n] for n in ("directly", "multiplied", "item", "index", "index_plus", "if")})
def cpu_tensor_argument(world: World, use: Callable) -> Program:
    step = world.compile(use)
    yield step(world.batch(0), torch.tensor(1.0))
    yield step(world.batch(0), torch.tensor(2.0 if world.changes else 1.0))


@row()
def cpu_tensor_of_another_dtype(world: World) -> Program:
    scale = torch.tensor(1.5)
    step = world.compile(lambda x: x * scale)
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        scale = torch.tensor(2)
    yield step(world.batch(0))


@row()
def cpu_buffer_of_a_module(world: World) -> Program:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor(2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.scale + 1)

    model = Scaled()
    step = world.compile(lambda x: model(x))
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(model.scale.fill_, 3.0)
    yield step(world.batch(0))
    world.change(setattr, model, "scale", torch.tensor(5.0))
    yield step(world.batch(0))


@row()
def cpu_constant_made_in_the_step(world: World) -> Program:
    """What the step makes of nothing is a constant; of a closure's number it isn't."""
    count = 2
    step = world.compile(lambda x: x * torch.arange(6.0)[count] + torch.ones(()) * count)
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        count = 3
    yield step(world.batch(0))


@row()
def cpu_tensor_moved_in_the_step(world: World) -> Program:
    scale = torch.full((4, 6), 2.0)
    step = world.compile(lambda x: x + scale.to(x.device))
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(scale.fill_, 3.0)
    yield step(world.batch(0))


@row()
def cpu_numbers_drawn(world: World) -> Program:
    """Random numbers of the CPU's generator, other ones in every call."""
    step = world.compile(lambda x: x * (torch.rand(6) if world.changes else 1.0))
    torch.manual_seed(3)
    yield step(world.batch(0))
    yield step(world.batch(0))


@row()
def cpu_tensor_written_in_the_step(world: World) -> Program:
    count = torch.zeros(())

    def function(x: torch.Tensor) -> torch.Tensor:
        if world.changes:
            count.add_(1)
        return x * count

    step = world.compile(function)
    yield step(world.batch(0)), count
    yield step(world.batch(0)), count


@row()
def cpu_counter(world: World) -> Program:
    """Written twice, read in between; the user sets it; a call that fails doesn't count."""
    count = torch.zeros(())

    def function(x: torch.Tensor, bad: bool) -> torch.Tensor:
        count.add_(1)
        out = x * count
        count.mul_(1.5)
        if bad:
            raise ValueError("as asked for")
        return out + count

    step = world.compile(function)
    for i in range(3):
        world.fail(step, world.batch(i), True)
        yield step(world.batch(i), False), count.clone()
    world.change(count.zero_)
    yield step(world.batch(3), False), count.clone()
    world.traced_at_most(1, step)


@row(unseen=True)
def cpu_argument_written(world: World) -> Program:
    def function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        n[0] += 1
        n.mul_(2)
        return x * n.sum()

    step = world.compile(function)
    n = torch.ones(3)
    for i in range(3):
        yield step(world.batch(i), n), n.clone()
    other = torch.full((3,), 5.0)
    yield step(world.batch(3), other), other, n


@row(unseen=True)
def cpu_view_written(world: World) -> Program:
    table = torch.zeros(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        table[1].add_(1)
        return x * table.sum()

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), table.clone()


@row(unseen=True)
def cpu_tensor_written_after_a_view(world: World) -> Program:
    table = torch.zeros(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        part = table[1]
        table.add_(1)
        return x * part

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), table.clone()


CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
}


def differentiate(world: World) -> tuple[nn.Parameter, Callable]:
    weight = world.parameter(numbers(1, 4, 6))

    def step(x: torch.Tensor) -> list:
        weight.grad = None
        loss = (weight * x).sum()
        if loss.requires_grad:
            loss.backward()
        return [loss.detach(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()]

    return weight, world.compile(step)


@rows(CONTEXTS)
def gradients_off_around_the_call(world: World, context: Callable) -> Program:
    weight, step = differentiate(world)
    yield step(world.batch(0)), weight.grad
    with context() if world.changes else contextlib.nullcontext():
        results = step(world.batch(0)), weight.grad
    yield results
    yield step(world.batch(0)), weight.grad


@rows({"no_grad": torch.no_grad, "set_grad_enabled": lambda: torch.set_grad_enabled(False)})
def gradients_off_at_first(world: World, context: Callable) -> Program:
    weight, step = differentiate(world)
    with context() if world.changes else contextlib.nullcontext():
        results = step(world.batch(0)), weight.grad
    yield results
    yield step(world.batch(0)), weight.grad


@row()
def gradients_on_inside_no_grad(world: World) -> Program:
    weight, step = differentiate(world)
    with torch.no_grad():
        results = step(world.batch(0)), weight.grad
        with torch.enable_grad() if world.changes else contextlib.nullcontext():
            more = step(world.batch(0)), weight.grad
    yield results
    yield more


# How to set, how to put back, and a step that shows it.
GLOBALS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable]] = {
    "default_dtype": (
        lambda: torch.set_default_dtype(torch.bfloat16),
        lambda: torch.set_default_dtype(torch.float32),
        lambda x: x.int() / 2,
    ),
    "default_dtype_of_a_factory": (
        lambda: torch.set_default_dtype(torch.bfloat16),
        lambda: torch.set_default_dtype(torch.float32),
        lambda x: torch.ones(3, device=x.device) / 3,
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
        lambda x: x * 2 if torch.are_deterministic_algorithms_enabled() else x,
    ),
    "deterministic_warn_only": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: torch.use_deterministic_algorithms(False),
        lambda x: x * 2 if torch.is_deterministic_algorithms_warn_only_enabled() else x,
    ),
    "matmul_precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
        lambda x: x * len(torch.get_float32_matmul_precision()),
    ),
    "anomaly_mode": (
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(False),
        lambda x: x * 2 if torch.is_anomaly_enabled() else x,
    ),
    "torch_function": (
        lambda: setattr(torch, "users_own", 2.0),
        lambda: delattr(torch, "users_own"),
        lambda x: x * getattr(torch, "users_own", 1.0),
    ),
}


@rows(GLOBALS)
def global_setting(world: World, case: tuple[Callable, Callable, Callable]) -> Program:
    change, undo, function = case
    step = world.compile(function)
    yield step(world.batch(0))
    yield step(world.batch(0))
    try:
        world.change(change)
        results = step(world.batch(0))
    finally:
        if world.changes:
            undo()
    yield results
    yield step(world.batch(0))


class Doubled(TorchFunctionMode):
    """Every multiplication gives twice as much."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + result if func in (torch.Tensor.mul, torch.mul) else result


class DoubledBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + result if func is torch.ops.aten.mul.Tensor else result


@rows({"function": Doubled, "dispatch": DoubledBelow})
def mode_around_the_call(world: World, mode: Callable) -> Program:
    step = world.compile(lambda x: torch.mul(x, x))
    yield step(world.batch(0))
    yield step(world.batch(0))
    with mode() if world.changes else contextlib.nullcontext():
        results = step(world.batch(0))
    yield results
    yield step(world.batch(0))


@row()
def autocast_around_the_call(world: World) -> Program:
    weight = world.tensor(numbers(1, 6, 8), None)
    step = world.compile(lambda x: (x @ weight).dtype == torch.bfloat16)
    yield step(world.batch(0))
    context = lambda: torch.autocast(world.device, torch.bfloat16)
    with context() if world.changes else contextlib.nullcontext():
        results = step(world.batch(0))
    yield results


@row()
def saved_tensors_hooks_around_the_call(world: World) -> Program:
    weight = world.parameter(numbers(1, 4, 6))

    def function(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        (weight * x * weight).sum().backward()
        return weight.grad * 1

    step = world.compile(function)
    yield step(world.batch(0))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t)
    with hooks if world.changes else contextlib.nullcontext():
        results = step(world.batch(0))
    yield results


@row()
def device_context_around_the_call(world: World) -> Program:
    step = world.compile(lambda x: x * len(str(torch.empty(0).device)))
    x = world.batch(0)
    yield step(x)
    yield step(x)
    with torch.device("meta") if world.changes else contextlib.nullcontext():
        results = step(x)
    yield results


@row()
def history_of_losses_shortened(world: World) -> Program:
    """A list of numbers of which one has changed, and that is shorter than it was."""
    losses = [1.0, 2.0, 9.0]
    step = world.compile(lambda x: x * float(np.mean(losses)))
    yield step(world.batch(0))
    losses[0] = 5.0
    yield step(world.batch(0))
    world.change(losses.pop, 0)
    yield step(world.batch(0))
    world.change(losses.pop)
    yield step(world.batch(0))


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda table: table[1:],
    "data": lambda table: table.data,
    "detached": lambda table: table.detach(),
}


@rows(PARTS)
def cpu_tensor_read_through_another_that_is_written(world: World, part: Callable) -> Program:
    table = torch.zeros(3)
    other = part(table) if world.changes else part(table.clone())

    def function(x: torch.Tensor) -> torch.Tensor:
        table.add_(1)
        return x * other.sum().to(x.device) + sum(other.tolist())

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), table.clone()


@rows(PARTS)
def cpu_argument_that_is_part_of_a_captured_one(world: World, part: Callable) -> Program:
    """It is written: at first another, then one that the step reads elsewhere, too."""
    table = torch.zeros(3)

    def function(x: torch.Tensor, t: torch.Tensor, also: torch.Tensor) -> torch.Tensor:
        t.add_(1)
        return x + also.sum().to(x.device) + table.sum().to(x.device)

    step = world.compile(function)
    x = world.batch(0)
    yield step(x, torch.ones(3), torch.ones(3)), table.clone()
    given = table if world.changes else table.clone()
    yield step(x, given, part(given)), table.clone()


GIVEN_AWAY: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "views": lambda c, n: (c[1], c.view(-1), c.detach(), c.T),
    "row": lambda c, n: c[n],
    "row_of_what_is_written": lambda c, n: c.add_(1)[n],
    "its_own": lambda c, n: ((c + 1)[None].unbind()[0],) * 2,
    "constants": lambda c, n: (lambda made: (made, made[1], made))(torch.zeros(2, 3)),
}


@rows(GIVEN_AWAY)
def cpu_view_given_away(world: World, view: Callable) -> Program:
    """The caller writes to what a step has returned or left, and looks at all that shares it."""
    cpu, holder = numbers(0, 3, 4), SimpleNamespace(left=None)
    world.watch(cpu=cpu, holder=holder)

    def function(x: torch.Tensor, n: int) -> list[Any]:
        shown = view(cpu, n)
        holder.left = shown[0]
        return [x * 2, shown]

    step = world.compile(function)
    for n in range(3):
        found = step(world.batch(n), n)
        if world.changes:
            last = found[1] if isinstance(found[1], torch.Tensor) else found[1][-1]
            last.flatten()[0] = n
            last.mul_(3)
        yield found


@row()
def view_of_a_cpu_argument_given_away(world: World) -> Program:
    step = world.compile(lambda x, cpu: [x * cpu[0], cpu[1:], cpu])
    for n in range(3):
        cpu = numbers(n, 3)
        found = step(world.batch(n), cpu)
        if world.changes:
            found[1].zero_()
        yield found, cpu, found[2] is cpu


@row()
def array_written_behind_from_numpy(world: World) -> Program:
    scale = torch.ones(())

    def function(x: torch.Tensor) -> torch.Tensor:
        array = np.zeros(3, np.float32)
        shown = torch.from_numpy(array)
        if world.changes:
            array += 1
        return x * (shown * scale).sum()

    step = world.compile(function)
    for i in range(2):
        yield step(world.batch(i))
        scale.add_(1)
