"""Tensor and sequence parallelism under FSDP: torch's styles, the loss over a sharded vocabulary.

python examples/recipes/tp_sp.py
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "64")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import xla_dtensor as xd

VOCAB, DIM, HEAD, LENGTH = 64, 32, 8, 16
DP, TP = 2, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(attended.transpose(1, 2).flatten(2))  # of a device's heads


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(DIM), Attention()
        self.norm2 = nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layer1, self.layer2 = Layer(), Layer()
        self.norm, self.out = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)


# Between layers activations are cut by position, inside of attention and MLP by heads and features.
GATHERED = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layer*.norm*": SequenceParallel(),
    "layer*.attention": GATHERED,
    **{f"layer*.attention.{name}": COLUMNS for name in ("q", "k", "v")},
    "layer*.attention.proj": ROWS,
    "layer*.up": ColwiseParallel(input_layouts=Shard(1)),
    "layer*.down": ROWS,
    "norm": SequenceParallel(),
    "out": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch: squares modulo the vocabulary."""
    tokens = (torch.arange(4 * DP)[:, None] + 7 * step + torch.arange(LENGTH + 1)).square() % VOCAB
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(steps: int) -> list[float]:
    mesh = xd.init_device_mesh("xla", (DP, TP), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Decoder().to("xla")
    parallelize_module(model, mesh["tp"], PLAN)
    for layer in (model.layer1, model.layer2, model):
        xd.fully_shard(layer, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @xd.compile
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss = loss_of(model, tokens, targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = []
    for i in range(steps):
        own = [xd.from_device_values(list(t.chunk(DP)), mesh["dp"]) for t in batch(i)]
        loss = step(*own)
        losses.append(float(torch.stack(loss.to_local().local_values()).mean()))
    return losses


if __name__ == "__main__":
    for loss in train(10):
        print(f"{loss:.4f}")
