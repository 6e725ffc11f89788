"""Context parallelism: long sequences, cut over "cp"; attention sees all of them.

python examples/recipes/cp.py
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "64")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

VOCAB, DIM, HEADS, LENGTH, ROWS = 32, 24, 3, 64, 4
DP, CP = 2, 4


def rotated(x: Tensor) -> Tensor:
    """Rotary positions; ``x``: [batch, heads, positions, width]."""
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1) * rates
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.proj = (nn.Linear(DIM, DIM) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 96), nn.GELU(), nn.Linear(96, DIM)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (
            f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(VOCAB, DIM), Layer(), Layer(), nn.Linear(DIM, VOCAB))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """What has to be said again half a sequence later, in a few of the words."""
    half = torch.randint(
        VOCAB // 4, (ROWS, LENGTH // 2), generator=torch.Generator().manual_seed(step)
    )
    tokens = torch.cat([half, half, half[:, :1]], 1)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(steps: int) -> list[float]:
    mesh = xd.init_device_mesh("xla", (DP, CP), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    model = xd.distribute_module(Model(), mesh)  # the same parameters on all devices
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def keep_cut(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out.redistribute(placements=[Shard(0), Shard(1)])

    for layer in model:
        layer.register_forward_hook(keep_cut)  # rows over "dp", positions over "cp"

    @xd.compile
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().redistribute(placements=[Replicate(), Replicate()])

    losses = []
    for i in range(steps):
        given = [distribute_tensor(t, mesh, [Shard(0), Shard(1)]) for t in batch(i)]
        losses.append(step(*given).item())
    return losses


if __name__ == "__main__":
    for loss in train(10):
        print(f"{loss:.4f}")
