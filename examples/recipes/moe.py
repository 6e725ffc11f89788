"""Mixture of experts: experts over "ep", tokens to the two best by static buffers (GShard's, as in
arXiv:2006.16668). Tokens that find a buffer full pass by; how many is counted.

    python examples/recipes/moe.py
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "64")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

FEATURES, DIM, HIDDEN, EXPERTS, TOP, CLASSES = 8, 16, 32, 8, 2, 8
DP, EP, TOKENS = 2, 4, 64
CAPACITY = 24  # tokens per expert and batch; 64 x 2 / 8 = 16 if they were spread evenly


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)
        self.register_buffer("dropped", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:  # [tokens, features]
        gates, chosen = self.router(x).softmax(-1).topk(TOP)
        gates = gates / gates.sum(-1, keepdim=True)
        wanted = F.one_hot(chosen, EXPERTS)  # [tokens, top, experts]
        # Places in the experts' buffers are given out by rank of choice, then by token.
        in_line = wanted.transpose(0, 1).flatten(0, 1).cumsum(0) - 1
        place = in_line.unflatten(0, (TOP, -1)).transpose(0, 1)
        fits = wanted * (place < CAPACITY)
        self.dropped += (wanted - fits).sum()
        slots = F.one_hot(place.clamp(0, CAPACITY - 1), CAPACITY) * fits.unsqueeze(-1)
        combine = (slots * gates[..., None, None]).sum(1)  # [tokens, experts, capacity]
        dispatch = slots.sum(1).to(x.dtype)
        # From tokens to experts and back: XLA's all-to-alls, where experts are sharded.
        buffers = torch.einsum("tec,td->ecd", dispatch, x)
        hidden = F.gelu(torch.einsum("ecd,edh->ech", buffers, self.up))
        results = torch.einsum("ech,ehd->ecd", hidden, self.down)
        return x + torch.einsum("tec,ecd->td", combine, results)


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, DIM), Experts(), Experts(), nn.Linear(DIM, CLASSES))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The octant in which a point lies."""
    x = torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(step))
    return x, ((x[:, :3] > 0) * torch.tensor([1, 2, 4])).sum(-1)


def loss_of(model: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(model(x), classes)


def train(steps: int) -> list[float]:
    mesh = xd.init_device_mesh("xla", (DP, EP), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)

    def lay_out(name: str, module: nn.Module, mesh: xd.DeviceMesh) -> None:
        if isinstance(module, Experts):
            for key in ("up", "down"):
                value = distribute_tensor(getattr(module, key), mesh, [Replicate(), Shard(0)])
                module.register_parameter(key, nn.Parameter(value))

    model = xd.distribute_module(Model(), mesh, lay_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @xd.compile
    def step(x: Tensor, classes: Tensor) -> Tensor:
        loss = loss_of(model, x, classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().redistribute(placements=[Replicate(), Replicate()])

    losses = []
    for i in range(steps):
        # Rows over all devices: those along "ep" have different tokens, too.
        given = [distribute_tensor(t, mesh, [Shard(0), Shard(0)]) for t in batch(i)]
        losses.append(step(*given).item())
    return losses


if __name__ == "__main__":
    for loss in train(10):
        print(f"{loss:.4f}")
