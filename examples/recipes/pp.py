"""Pipeline parallelism: torch's interleaved 1F1B, compiled stages, data parallelism inside of each.

python examples/recipes/pp.py
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "64")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd

VOCAB, DIM, LENGTH = 48, 32, 12
PP, DP, STAGES, MICROBATCHES = 2, 2, 4, 4


class Mixer(nn.Module):
    """Mixes over the past of each feature, then over features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.past = nn.Conv1d(DIM, DIM, kernel_size=3, groups=DIM)
        self.features = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        past = self.past(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        return x + self.features(self.norm(x + past))


def modules() -> list[nn.Module]:
    """The model, in parts of one stage each."""
    middle = [nn.Sequential(Mixer(), Mixer()) for _ in range(STAGES - 2)]
    first = nn.Sequential(nn.Embedding(VOCAB, DIM), Mixer())
    return [first, *middle, nn.Sequential(Mixer(), nn.Linear(DIM, VOCAB))]


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*modules())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Fibonacci's rule modulo the vocabulary, from starts of each row's own."""
    columns = [torch.arange(8) + step, 3 * torch.arange(8) + 1]
    while len(columns) <= LENGTH:
        columns.append((columns[-1] + columns[-2]) % VOCAB)
    tokens = torch.stack(columns, 1)
    return tokens[:, :-1], tokens[:, 1:]


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return next_token(model(tokens), targets)


def train(steps: int) -> list[float]:
    mesh = xd.init_device_mesh("xla", (PP, DP), mesh_dim_names=("pp", "dp"))
    meshes = xd.pipeline.stage_meshes(mesh)
    torch.manual_seed(0)
    stages = []
    for i, module in enumerate(modules()):
        on = meshes[i % PP]
        stages.append(
            xd.pipeline.PipelineStage(xd.distribute_module(module, on), i, STAGES, on, compile=True)
        )
    pipeline = xd.pipeline.PipelineSchedule(
        ScheduleInterleaved1F1B, stages, MICROBATCHES, next_token
    )
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)

    result = []
    for i in range(steps):
        tokens, targets = (distribute_tensor(t, mesh["dp"], [Shard(0)]) for t in batch(i))
        losses: list[Tensor] = []
        pipeline.step(tokens, target=targets, losses=losses, return_outputs=False)
        nn.utils.clip_grad_norm_(parameters, 1.0)  # of all stages
        optimizer.step()
        optimizer.zero_grad()
        result.append(float(torch.stack([loss.detach().full_tensor() for loss in losses]).mean()))
    return result


if __name__ == "__main__":
    for loss in train(10):
        print(f"{loss:.4f}")
