"""Programs around a step compiled with ``watch="replay"``, each compared with itself on the CPU."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.compilation.test_replayed import numbers
from tests.conftest import make_mesh


class Cpu:
    """Plain torch."""

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def compile(self, step: Callable[..., Any]) -> Any:
        return step

    def few(self, step: Any, programs: int) -> None:
        """Fails where ``step`` was compiled more often."""


class Mesh(Cpu):
    """The same on a mesh, the steps compiled."""

    def __init__(self, shape: str) -> None:
        self.mesh = make_mesh(shape)
        self.others = [Replicate()] * (self.mesh.ndim - 1)

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(value.clone(), self.mesh, [Shard(0), *self.others])

    def model(self) -> nn.Module:
        return xd.distribute_module(super().model(), self.mesh)

    def compile(self, step: Callable[..., Any]) -> Any:
        return xd.compile(step, watch="replay")

    def few(self, step: Any, programs: int) -> None:
        assert step.compilations <= programs, step.recompilations


def kept_and_used_later(world: Cpu) -> Any:
    """Values and views of a call that later calls and eager code read."""
    kept: list[torch.Tensor] = []
    x = world.tensor(numbers(0, 4, 4))

    def step() -> torch.Tensor:
        y = x * (len(kept) + 1)
        kept.extend([y.sin(), y[1]])
        return sum(some.sum() for some in kept[:4])  # type: ignore[return-value]

    replayed = world.compile(step)
    return [replayed() for _ in range(4)], kept, [some + 1 for some in kept]


def views_of_results_are_written(world: Cpu) -> Any:
    x = world.tensor(numbers(0, 4, 6))

    def step() -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y, y[1], y.t(), y[:, 2:4]

    replayed, seen = world.compile(step), []
    for _ in range(3):
        y, row, turned, columns = replayed()
        row.add_(1)
        columns.mul_(3)
        seen.append([y.clone(), row.clone(), turned.clone()])
        x.add_(0.5)
    world.few(replayed, 1)
    return seen


def views_of_what_is_overwritten(world: Cpu) -> Any:
    w = world.tensor(numbers(0, 4, 6))
    seen, detached, rows = [], w.detach(), w[2:4]

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        w.add_(1)
        return w[1], w.t()

    replayed = world.compile(step)
    for _ in range(3):
        row, turned = replayed()
        row.mul_(2)
        turned[0].zero_()
        seen += [row, turned, rows.clone(), detached.clone()]
    return seen, w


def gradients_over_several_calls(world: Cpu) -> Any:
    model = world.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def add(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    one, other, seen = world.compile(add), world.compile(update), []
    for i in range(6):
        seen.append(one(world.tensor(numbers(i, 4, 4))))
        if i % 3 == 2:
            other()
        else:
            seen += [p.grad.clone() for p in model.parameters()]
    world.few(one, 2)
    world.few(other, 1)
    return seen, list(model.parameters())


def optimizers_in_hooks(world: Cpu) -> Any:
    model, x = world.model(), world.tensor(numbers(0, 4, 4))
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    seen: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(own))}

    def update(index: int, p: torch.Tensor) -> None:
        own[p].step()
        own[p].zero_grad()
        seen[index].append(p.sum())

    for i, p in enumerate(own):
        p.register_post_accumulate_grad_hook(lambda p, i=i: update(i, p))

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    replayed = world.compile(step)
    return [replayed() for _ in range(3)], seen, list(own)


def a_scale_that_values_decide(world: Cpu) -> Any:
    """What a `GradScaler` does, by reading values."""
    model, x = world.model(), world.tensor(numbers(0, 4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"scale": 1024.0}

    def step(factor: float) -> tuple[torch.Tensor, bool]:
        loss = model(x * factor).square().mean()
        (loss * state["scale"]).backward()
        finite = all(torch.isfinite(p.grad).all().item() for p in model.parameters())
        if finite:
            for p in model.parameters():
                p.grad.div_(state["scale"])
            optimizer.step()
        else:
            state["scale"] /= 2
        optimizer.zero_grad()
        return loss.detach(), finite

    replayed = world.compile(step)
    factors = (1.0, float("inf"), 2.0, 1e30, 1.0)
    return [replayed(f) for f in factors], state, list(model.parameters())


def a_loop_that_values_end(world: Cpu) -> Any:
    x = world.tensor(numbers(0, 4, 4).abs())

    def step() -> tuple[torch.Tensor, int]:
        y, n = x, 0
        while y.max() > 0.05:
            y, n = y * 0.5, n + 1
        return y, n

    replayed, seen = world.compile(step), []
    for _ in range(3):
        seen.append(replayed())
        x.mul_(3)
    world.few(replayed, 3)
    return seen


def gradients_of_gradients(world: Cpu) -> Any:
    x, w = (world.tensor(numbers(i, 4, 4)).requires_grad_() for i in range(2))

    def step() -> torch.Tensor:
        (grad,) = torch.autograd.grad((x @ w).tanh().sum(), x, create_graph=True)
        loss = grad.square().sum()
        loss.backward()
        return loss.detach()

    replayed, seen = world.compile(step), []
    for _ in range(3):
        seen += [replayed(), w.grad.clone(), x.grad.clone()]
    return seen


def states_saved_and_loaded(world: Cpu) -> Any:
    model, x = world.model(), world.tensor(numbers(0, 4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    replayed = world.compile(step)
    seen = [replayed(), replayed()]
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    live = model.state_dict()
    seen += [replayed(), replayed()]
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    copied = copy.deepcopy(model)
    seen += [replayed(), replayed()]
    world.few(replayed, 1)
    return seen, [list(m.parameters()) for m in (model, copied)], list(live.values())


def tensors_on_the_cpu(world: Cpu) -> Any:
    """Written between calls, and in them."""
    x = world.tensor(numbers(0, 4, 4))
    between, inside = torch.arange(4.0), torch.zeros(4)

    def step() -> torch.Tensor:
        y = x * between + inside
        inside.add_(1)
        return y * inside + between.sum().item()

    replayed, seen = world.compile(step), []
    for _ in range(3):
        seen.append(replayed())
        between.mul_(2)
    world.few(replayed, 1)
    return seen, inside


def what_nobody_holds_is_gone(world: Cpu) -> Any:
    x = world.tensor(numbers(0, 4, 4))
    gone = []

    def step() -> torch.Tensor:
        y = x * 3
        reference, z = weakref.ref(y), y + 1
        del y
        gone.append(reference() is None)
        return z

    replayed = world.compile(step)
    return [replayed() for _ in range(2)], gone


PROGRAMS = [
    kept_and_used_later,
    views_of_results_are_written,
    views_of_what_is_overwritten,
    gradients_over_several_calls,
    optimizers_in_hooks,
    a_scale_that_values_decide,
    a_loop_that_values_end,
    gradients_of_gradients,
    states_saved_and_loaded,
    tensors_on_the_cpu,
    what_nobody_holds_is_gone,
]


def on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.full_tensor().cpu() if hasattr(value, "full_tensor") else value
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [on_cpu(item) for item in value]
    return value


@pytest.mark.one_in(5)
@pytest.mark.parametrize("shape", ["2x4", "2x2x2", "4"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_on_the_cpu(program: Callable[[Cpu], Any], shape: str) -> None:
    expected, actual = on_cpu(program(Cpu())), on_cpu(program(Mesh(shape)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
