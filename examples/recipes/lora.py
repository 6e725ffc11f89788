"""LoRA: a frozen model, sharded over all devices, and low-rank corrections that learn
(arXiv:2106.09685). Only these have gradients and optimizer state.

    python examples/recipes/lora.py
"""

from __future__ import annotations

import itertools
import os

os.environ.setdefault("NPROC", "64")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd

FEATURES, DIM, RANK, SCALE = 16, 64, 4, 2.0
DEVICES, ROWS = 8, 32


class Adapted(nn.Module):
    """A frozen linear layer, and a product of two small matrices that is added to it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # begins as what it was

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + SCALE * self.up(self.down(x))


class Model(nn.Sequential):
    def __init__(self) -> None:
        widths = (FEATURES, DIM, DIM, FEATURES)
        layers = [nn.Linear(i, o) for i, o in itertools.pairwise(widths)]
        super().__init__(
            Adapted(layers[0]), nn.SiLU(), Adapted(layers[1]), nn.SiLU(), Adapted(layers[2])
        )


def learning(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The same vectors, turned by one place."""
    x = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, -1)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def train(steps: int) -> list[float]:
    mesh = xd.init_device_mesh("xla", (DEVICES,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Model()
    for layer in model:
        if isinstance(layer, Adapted):  # the frozen layers are what takes memory
            xd.fully_shard(layer.frozen, mesh=mesh)
    xd.replicate(model, mesh=mesh)
    optimizer = torch.optim.AdamW(learning(model), lr=1e-2)

    @xd.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = []
    for i in range(steps):
        given = [distribute_tensor(t, mesh, [Shard(0)]) for t in batch(i)]
        losses.append(step(*given).full_tensor().item())
    return losses


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """What has been learned, for a checkpoint: two small matrices for each layer."""
    return {name: value for name, value in model.state_dict().items() if ".frozen." not in name}


if __name__ == "__main__":
    for loss in train(10):
        print(f"{loss:.4f}")
