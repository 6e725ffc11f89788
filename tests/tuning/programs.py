"""What the tests of `xd.tune` train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(width: int = 64, layers: int = 3) -> Callable[[Any], Callable[..., torch.Tensor]]:
    """What `xd.tune` takes: a step of AdamW, of the same parameters each time."""
    return training(lambda: Model(width, layers))


def training(
    make: Callable[[], nn.Module], optimizer_class: Any = torch.optim.AdamW, lr: float = 1e-2
) -> Callable[[Any], Callable[..., torch.Tensor]]:
    """The same of another model; the targets of a batch are 0 where it has none."""

    def built(parallelize: Callable[[nn.Module], nn.Module]) -> Callable[..., torch.Tensor]:
        torch.manual_seed(0)
        model = parallelize(make())
        optimizer = optimizer_class(model.parameters(), lr=lr)

        def step(x: torch.Tensor, y: torch.Tensor | float = 0.0) -> torch.Tensor:
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return built


def batch(rows: int, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(rows, width, generator=generator),
        torch.randn(rows, 1, generator=generator),
    )
