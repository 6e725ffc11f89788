"""A training of a small model that goes on with whatever hosts there are:
``python -m tests.elastic.programs.training FOLDER STEPS SECONDS ENDPOINT MOST_HOSTS``, where a step
takes so many seconds and more.

Process 0 writes a line for each step: step, devices, loss, the samples, and when; and one for each
start: when its process began, had met the others, had restored, and from which step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import xla_dtensor as xd

SAMPLES, BATCH = 96, 24  # 24 divides by 2, 4, 6 and 8 devices


def began() -> float:
    """When this process did, as `time.time` has it."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def samples() -> torch.Tensor:
    return torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))


def rows(step: int) -> list[int]:
    """The samples of a step: a new order in each epoch, the same on any number of devices."""
    epoch, place = divmod(step, SAMPLES // BATCH)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    return order[place * BATCH : (place + 1) * BATCH].tolist()


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 16))


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.5)


def expected(steps: int) -> list[float]:
    """The losses of CPU torch."""
    model, data = model_of(), samples()
    optimizer, schedule = optimizer_of(model)
    losses = []
    for i in range(steps):
        loss = (model(data[rows(i)]) - data[rows(i)]).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return losses


def train(devices: int) -> None:
    folder, steps, joined = Path(sys.argv[1]), int(sys.argv[2]), time.time()
    mesh = xd.init_device_mesh("xla", (devices,), mesh_dim_names=("dp",))
    model, data = model_of().to("xla"), samples()
    xd.fully_shard(model, mesh=mesh)
    optimizer, schedule = optimizer_of(model)

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = xd.distributed.process_index() == 0
    with (
        (folder / "steps.jsonl").open("a") as log,
        xd.checkpoint.CheckpointManager(
            folder / "disk", objects, every=50, in_memory_every=1
        ) as manager,
    ):
        done = manager.restore()
        if first:
            with (folder / "starts.jsonl").open("a") as starts:
                print(json.dumps([began(), joined, time.time(), done, devices]), file=starts)
        for i in range(done, steps):
            x = xd.distribute_tensor(data[rows(i)], mesh, [xd.Shard(0)])
            loss = step(x).item()
            schedule.step()
            if first:
                print(json.dumps([i, devices, loss, rows(i), time.time()]), file=log, flush=True)
            if manager.after_step(i + 1):
                return
            time.sleep(float(sys.argv[3]))


if __name__ == "__main__":
    hosts, endpoint = (1, int(sys.argv[5])), sys.argv[4]
    xd.elastic.run(train, hosts=hosts, endpoint=endpoint, heartbeat_timeout=5, settle=8, grace=10)
