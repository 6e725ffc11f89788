"""HSDP: parameters sharded over the devices of a host and replicated over hosts, in bfloat16 with
float32 master weights; gradients of two micro-batches accumulate before one reduction.

    python examples/recipes/hsdp.py
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "64")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xla_dtensor as xd

FEATURES, DIM, CLASSES, PARTS = 24, 32, 10, 2
HOSTS, DEVICES = 2, 4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, DIM), nn.Linear(DIM, CLASSES)
        self.layers = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch: points around the centres of classes."""
    generator = torch.Generator().manual_seed(step)
    classes = torch.arange(2 * PARTS * HOSTS * DEVICES) % CLASSES
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(99))
    return centres[classes] + torch.randn(len(classes), FEATURES, generator=generator) / 4, classes


def loss_of(model: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), classes)


def train(steps: int, param_dtype: torch.dtype = torch.bfloat16) -> list[float]:
    mesh = xd.init_device_mesh("xla", (HOSTS, DEVICES), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = Classifier()
    policy = xd.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        xd.fully_shard(layer, mesh=mesh, mp_policy=policy)
    xd.fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @xd.compile
    def step(xs: list[Tensor], classes: list[Tensor]) -> Tensor:
        total = torch.zeros((), device="xla")
        for i in range(PARTS):
            model.set_requires_gradient_sync(i == PARTS - 1)  # the devices' sums until then
            loss = loss_of(model, xs[i], classes[i]) / PARTS
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    losses = []
    for i in range(steps):
        # Part by part, the rows of each device.
        x, classes = (
            [
                xd.from_device_values(list(part.chunk(HOSTS * DEVICES)), mesh)
                for part in t.chunk(PARTS)
            ]
            for t in batch(i)
        )
        losses.append(float(torch.stack(step(x, classes).local_values()).mean()))
    return losses


if __name__ == "__main__":
    for loss in train(10):
        print(f"{loss:.4f}")
