"""A small training run with everything that has a state, for tests of checkpoints."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd


class Data:
    """Endless batches, which know where they are."""

    def __init__(self, batch: int = 4) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.batch, self.position = batch, 0

    def __next__(self) -> torch.Tensor:
        self.position += 1
        return torch.randn(self.batch, 8, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.generator.set_state(state["generator"])


class Run:
    """A model with dropout and a buffer, its optimizer, its schedule, and data; random numbers of
    every kind go into each step."""

    def __init__(self, mesh: Any, compiled: bool = True) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        self.mesh = mesh
        self.model: Any = nn.Sequential(
            nn.Linear(8, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 3)
        )
        placed = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
        for module in self.model:
            for name, p in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(distribute_tensor(p.data, mesh, placed)))
            for name, b in list(module.named_buffers()):
                setattr(module, name, distribute_tensor(b, mesh, [Replicate()] * mesh.ndim))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.data = Data()
        self.log: dict[str, Any] = {"losses": []}
        self._step = xd.compile(self._train_step) if compiled else self._train_step

    def _train_step(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(x) * scale).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def objects(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "data": self.data,
            "log": self.log,
        }

    def step(self) -> float:
        x = distribute_tensor(next(self.data), self.mesh, [Replicate()] * self.mesh.ndim)
        draws = random.random() + np.random.rand() + torch.rand(()).item()
        loss = self._step(x, torch.tensor(1 + draws)).item()
        self.schedule.step()
        self.log["losses"].append(loss)
        return loss

    def digest(self) -> int:
        """Of all bits of the state, the schedule's and the random numbers' too."""
        found = 0
        tensors = [*self.model.state_dict().values()]
        for p in self.model.parameters():
            tensors += self.optimizer.state[p].values()
        for tensor in tensors:
            value = tensor.detach()
            value = (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
            found = zlib.crc32(value.contiguous().numpy().tobytes(), found)
        rest = [
            self.optimizer.param_groups[0]["lr"],
            self.schedule.last_epoch,
            self.data.position,
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
            torch.xla.get_rng_state().tolist(),  # type: ignore[attr-defined]
        ]
        return zlib.crc32(repr(rest).encode(), found)


def manager_of(run: Run, folder: Path, **kwargs: Any) -> xd.checkpoint.CheckpointManager:
    return xd.checkpoint.CheckpointManager(folder, run.objects(), **kwargs)
