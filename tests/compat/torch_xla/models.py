"""What the tests of torch_xla's names share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import xla_dtensor.compat.torch_xla.distributed.spmd as xs

DEVICES = 8


class TwoLayers(nn.Module):
    """Two linear layers, the last with one output."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 8)
        self.fc2 = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def mesh_of(shape: tuple[int, ...], names: Sequence[str] | None = None, ids: Any = None) -> xs.Mesh:
    return xs.Mesh(np.arange(DEVICES) if ids is None else ids, shape, names)


def tiled(dims: Sequence[int], order: Any = range(DEVICES), copies: int = 1) -> str:
    """How XLA writes a tiled sharding."""
    numbers = ",".join(map(str, np.asarray(order).reshape(-1)))
    if copies == 1:
        return f"{{devices=[{','.join(map(str, dims))}]{numbers}}}"
    return f"{{devices=[{','.join(map(str, [*dims, copies]))}]{numbers} last_tile_dim_replicate}}"
