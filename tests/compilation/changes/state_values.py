"""Changes of tensors on the devices whose values the step's Python looks at."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.compilation.changes._table import Program, row, rows, trainer
from tests.compilation.changes._world import World

State = SimpleNamespace


def _selected_and_written(s: State, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, s.mask] = y[:, s.mask] * 3
    return y


def _counted_before(s: State, x: torch.Tensor) -> torch.Tensor:
    """What the step writes of such values alone, it can look at."""
    s.count.add_(1)
    return x + s.count if s.count[0] % 2 else x - s.count


def _decided_before_a_write(s: State, x: torch.Tensor) -> torch.Tensor:
    is_low = s.count[1] < 3
    s.count.add_(x.sum().long())
    return x * 2 if is_low else x


def _copied_to_the_host(s: State, x: torch.Tensor) -> torch.Tensor:
    table = torch.zeros(6, dtype=torch.float64)
    table[:6].copy_(s.scale)
    table += 1
    return x * table.sum().to(x.device).float()


def _selected_twice(s: State, x: torch.Tensor) -> torch.Tensor:
    on_host = s.scale.to("cpu", copy=True)
    on_host[0] = 5.0  # the next copy has none of it
    return x * on_host.sum().item() - s.scale.cpu().sum().item()


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


USES: dict[str, Callable[[State, torch.Tensor], torch.Tensor]] = {
    "if": lambda s, x: x * 2 if s.scale[0] > 0.5 else x,
    "any": lambda s, x: x * 2 if (s.scale * 2 > 1.9).any() else x * 3,
    "item": lambda s, x: x * s.scale.max().item(),
    "float": lambda s, x: x * float(s.count[2]),
    "int": lambda s, x: x[:, int(s.count[2])],
    "range": lambda s, x: x * sum(range(s.count[3])),
    "size": lambda s, x: torch.stack([x[:, i] for i in range(int(s.mask.sum()))]),
    "text": lambda s, x: x * float(f"{s.scale[0].item():.3f}"),
    "text_of_a_tensor": lambda s, x: x * {"0": 2.0, "4": 5.0}[f"{s.count[0]}"],
    "text_of_all": lambda s, x: x * (1 + ["[0, 1, 2, 3, 4, 5]" in f"{s.count}"].count(True)),
    "text_in_python": lambda s, x: x * (3.0 if "[4, 4" in str([s.count, s.count]) else 2.0),
    "for_each": lambda s, x: x * torch._foreach_mul([s.scale, s.scale], 2.0)[1].sum().item(),
    "decomposed": lambda s, x: x * 2 if torch.special.erfcx(s.scale).sum() < 3 else x,
    "tolist": lambda s, x: x * sum(s.scale.tolist()),
    "tolist_of_ints": lambda s, x: x * sum(s.count.tolist()),
    "numpy": lambda s, x: x * float(s.scale.cpu().numpy().mean()),
    "to_double": lambda s, x: x * s.scale.to("cpu", torch.float64).sum().item(),
    "copied": _copied_to_the_host,
    "a_copy": _selected_twice,
    "equal": lambda s, x: x * 2 if torch.equal(s.count, s.count.sort().values) else x,
    "whole": lambda s, x: x * _whole(s.scale * 2).sum().item(),
    "mask": lambda s, x: x[:, s.mask] * 2,
    "compared": lambda s, x: x[:, s.count > 3].sum(1),
    "masked_select": lambda s, x: x.masked_select(s.mask),
    "written": _selected_and_written,
    "nonzero": lambda s, x: x.index_select(1, s.mask.nonzero().flatten()),
    "unique": lambda s, x: x[:, : s.count.unique().numel() - 1],
    "repeated": lambda s, x: x.repeat_interleave(s.count[:4], 0),
    "counted": _counted_before,
    "decided_before": _decided_before_a_write,
}


@rows(USES)
def state_in_place(world: World, use: Callable) -> Program:
    state = SimpleNamespace(
        mask=world.tensor(torch.tensor([True, False, True, True, False, True])),
        count=world.tensor(torch.arange(6)),
        scale=world.tensor(torch.linspace(0.25, 0.75, 6)),
    )
    world.watch(state=state)
    step = world.compile(lambda x: use(state, x))
    yield step(world.batch(0))
    yield step(world.batch(1))
    world.change(state.mask.logical_not_)
    yield step(world.batch(2))
    world.change(state.count.copy_, torch.tensor([4, 4, 3, 2, 1, 0]).to(world.device))
    yield step(world.batch(3))
    world.change(state.scale.mul_, 3.0)
    yield step(world.batch(4))
    world.change(setattr, state, "mask", world.tensor(torch.ones(6, dtype=torch.bool)))
    world.change(setattr, state, "scale", world.tensor(torch.full((6,), 0.125)))
    yield step(world.batch(5))
    yield step(world.batch(6))


class ActNorm(nn.Module):
    """Kingma and Dhariwal's (Glow, 2018): the first batch says what it begins with."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.loc = world.parameter(torch.zeros(6), None)
        self.scale = world.parameter(torch.ones(6), None)
        self.register_buffer("initialized", world.tensor(torch.tensor(0, dtype=torch.uint8), None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.initialized.item() == 0:
            with torch.no_grad():
                self.loc.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-6))
                self.initialized.fill_(1)
        return self.scale * (x + self.loc)


@row()
def initialized_by_the_first_batch(world: World) -> Program:
    model = nn.Sequential(ActNorm(world), world.module(nn.Linear(6, 4)))
    _, step = trainer(world, model)
    yield step(world.batch(0))
    yield step(world.batch(1))
    yield step(world.batch(2))
    world.at_most(2, step)
    world.change(model[0].initialized.zero_)
    yield step(world.batch(3))
    yield step(world.batch(4))


class Average(nn.Module):
    """An average that begins as a copy, and moves in every third call: its buffers say when."""

    def __init__(self, world: World) -> None:
        super().__init__()
        whole = lambda value: world.tensor(torch.tensor(value), None)
        self.register_buffer("step", whole(0))
        self.register_buffer("started", whole(False))
        self.register_buffer("decay", whole(0.9))
        self.register_buffer("mean", whole([0.0] * 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = self.step.item()
        self.step += 1
        if step % 3 != 0:
            return x - self.mean
        if not self.started.item():
            self.mean.copy_(x.mean(0))
            self.started.fill_(True)
        self.mean.lerp_(x.mean(0), 1 - min(self.decay.item(), (1 + step) / (10 + step)))
        return x + self.mean


@row()
def counted_in_a_buffer(world: World) -> Program:
    model = Average(world)
    world.watch(model=model)
    step = world.compile(lambda x: model(x))
    for i in range(12):
        yield step(world.batch(i))
    world.at_most(6, step)
    world.change(model.step.zero_)
    world.change(model.decay.fill_, 0.05)
    for i in range(12, 16):
        yield step(world.batch(i))
    world.at_most(7, step)
