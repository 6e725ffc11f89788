"""A training step of a model of tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def training_step(model: nn.Module, lr: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Takes tokens and those that are to be predicted, and gives the loss; by AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
