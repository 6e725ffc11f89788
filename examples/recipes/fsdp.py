"""FSDP: parameters, gradients and optimizer state sharded over all devices, each with a batch of
its own, as a torchrun program has it.

    python examples/recipes/fsdp.py
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "64")  # threads for XLA's simulated CPU devices

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xla_dtensor as xd

VOCAB, DIM, HEADS, LENGTH = 64, 32, 4, 16
RANKS = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch: each number is the one before, plus a step of the row's own."""
    rows = torch.arange(2 * RANKS).unsqueeze(1) + step
    tokens = (rows * (1 + torch.arange(LENGTH + 1)) * 3) % VOCAB
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(steps: int) -> list[float]:
    mesh = xd.init_device_mesh("xla", (RANKS,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        xd.fully_shard(block, mesh=mesh)  # gathered for its forward, and again for its backward
    xd.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @xd.compile
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model, tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = []
    for i in range(steps):
        own = [xd.from_device_values(list(t.chunk(RANKS)), mesh) for t in batch(i)]
        losses.append(float(torch.stack(step(*own).local_values()).mean()))
    return losses


if __name__ == "__main__":
    for loss in train(10):
        print(f"{loss:.4f}")
