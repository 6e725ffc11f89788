"""Torch modules that the tests put into JAX programs, with inputs for each; batches come first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd


class TimesSeven(torch.autograd.Function):
    """A sine with a backward that is no sine's: it has to be this one that runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        ctx.save_for_backward(x, y)
        ctx.twice = x * 2  # a tensor that isn't saved as torch wants it
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        return gradient * 7 * ctx.twice + x * y


class Scaled(xd.DFunction):
    """A product, with another gradient than the product's."""

    _op_name = "test.Scaled"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class Tied(nn.Module):
    """A language model without a middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens).tanh())
        return logits


class First(nn.Module):
    """The first result of a module that gives several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> torch.Tensor:
        first: torch.Tensor = self.inner(*args)[0]
        return first


class Around(nn.Module):
    """A function of torch's around a linear layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[..., 1:] += x[..., :3]
    y.mul_(2)
    z = F.relu(y, inplace=True) * 1
    z[..., 0].zero_()
    return z + torch.empty_like(x).copy_(x)


def views(x: torch.Tensor) -> torch.Tensor:
    a, b = x.view(-1, 2, 2).transpose(1, 2).unbind(1)
    turned = torch.cat([a, b.flip(-1)], -1)
    return turned.as_strided(turned.shape, turned.stride()) * x.expand_as(turned)


def held_back(x: torch.Tensor) -> torch.Tensor:
    """Straight through a rounding, past what must not get a gradient."""
    with torch.no_grad():
        scale = x.abs().amax() + 1
    return x + (x.round() - x).detach() * scale + x.data * 2


def forces(x: torch.Tensor) -> torch.Tensor:
    """A gradient inside of the function."""
    energy = (x.tanh() * x.roll(1, -1)).sum()
    (found,) = torch.autograd.grad(energy, x, create_graph=True)
    return found


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    again: torch.Tensor = checkpoint(lambda y: y.sin() * y, x, use_reentrant=False)
    return again


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient * 5)
    return y.sin()


def kinks(x: torch.Tensor) -> torch.Tensor:
    """Derivatives where there are none: torch has its own."""
    zero = x * 0
    return F.relu(zero) + zero.abs() + zero.clamp(0, 1) + torch.maximum(zero, x * 0)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "conv and norm": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    ).eval(),
    "encoder layer": lambda: nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, batch_first=True, norm_first=True
    ),
    "attention": lambda: First(nn.MultiheadAttention(8, 2, batch_first=True)),
    "lstm": lambda: First(nn.LSTM(8, 5, num_layers=2, batch_first=True)),
    "tied": Tied,
    "autograd function": lambda: Around(TimesSeven.apply),  # type: ignore[arg-type]
    "DFunction": lambda: Around(Scaled.apply),
    "in place": lambda: Around(in_place),
    "views": lambda: Around(views),
    "held back": lambda: Around(held_back),
    "forces": lambda: Around(forces),
    "checkpoint": lambda: Around(checkpointed),
    "hook": lambda: Around(hooked),
    "kinks": lambda: Around(kinks),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
}
_INPUTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "conv and norm": ((4, 2, 8, 8),),
    "encoder layer": ((4, 5, 8),),
    "attention": ((4, 5, 8), (4, 3, 8), (4, 3, 8)),
    "lstm": ((4, 3, 8),),
}


def made(name: str) -> tuple[nn.Module, list[torch.Tensor]]:
    """A module and its inputs."""
    torch.manual_seed(sum(map(ord, name)))
    module = MODULES[name]()
    if name == "tied":
        return module, [torch.randint(0, 11, (4, 3))]
    return module, [torch.randn(*shape) for shape in _INPUTS.get(name, ((4, 4),))]
