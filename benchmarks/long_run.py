"""A long training run: whether memory, caches and the time of a step stay as they are.

    python benchmarks/long_run.py --steps 20000

A small transformer with dropout, `fully_shard` on a 2x2 mesh (replicas of shards), as one compiled
step with gradient clipping and a warm-up and cosine schedule; an evaluation every 200 steps
(another compiled step, in ``eval()``), a checkpoint every 1000 (asynchronous, the newest three
stay), metrics every 100. Each tenth of the run is a line; nothing should change after the first.

glibc's malloc keeps what is free in up to eight arenas a core, so a process with XLA's threads
grows for a long time though it has no more to keep. It is run with two (``--arenas``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xla_dtensor as xd

VOCABULARY, WIDTH, LENGTH, BATCH = 256, 64, 32, 16
TENTHS = 10


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(steps: int, folder: Path) -> list[dict[str, float]]:
    """The metrics of each hundred steps, with the entries of all caches."""
    torch.manual_seed(0)
    mesh = xd.init_device_mesh("xla", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Model()
    for layer in model.layers:
        xd.fully_shard(layer, mesh=mesh)
    xd.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    factor = lambda n: min(1.0, n / 100) * (0.55 + 0.45 * math.cos(math.pi * n / steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def loss_of(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @xd.compile
    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss.detach()

    @xd.compile
    def evaluate(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return loss_of(tokens)

    def batch(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        noise = torch.randint(4, (BATCH, LENGTH + 1), generator=generator)
        tokens = (starts + 7 * torch.arange(LENGTH + 1) + noise) % VOCABULARY
        return xd.distribute_tensor(tokens, mesh, [xd.Shard(0), xd.Shard(0)])

    found: list[dict[str, float]] = []

    def note(values: dict[str, float], step: int) -> None:
        entries = sum(cache.entries for cache in xd.debug.caches())
        found.append({"step": step, "entries": entries, **values})

    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with (
        xd.checkpoint.CheckpointManager(folder, objects, every=1000) as manager,
        xd.metrics.to(note, step, every=100) as metrics,
    ):
        validation = math.nan
        for number in range(1, steps + 1):
            loss = step(batch(number))
            if number % 200 == 0:
                with metrics.aside("evaluation"):
                    model.eval()
                    validation = evaluate(batch(-number)).item()
                    model.train()
            if manager.after_step(number):
                break
            metrics.after_step(number, loss=loss, validation=validation)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--save", type=Path, help="a file for all numbers")
    parser.add_argument("--arenas", default="2", help="of malloc's; 0: as many as it likes")
    options = parser.parse_args()
    if os.environ.get("MALLOC_ARENA_MAX", "0") != options.arenas:  # read when a process starts
        os.environ["MALLOC_ARENA_MAX"] = options.arenas
        os.execv(sys.executable, [sys.executable, *sys.argv])
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = train(options.steps, Path(folder))
    if options.save:
        options.save.write_text(json.dumps(found))
    print("| steps | ms a step | host MB | device MB | entries | traces | loss | validation |")
    print("|---|---|---|---|---|---|---|---|")
    ends = [len(found) * tenth // TENTHS for tenth in range(TENTHS + 1)]
    for part in (found[a:b] for a, b in itertools.pairwise(ends) if a < b):
        last = part[-1]
        cells = [
            f"{last['step']:,}",
            f"{1000 * statistics.median(one['step/seconds'] for one in part):.2f}",
            f"{statistics.median(one['memory/host_megabytes'] for one in part):.1f}",
            f"{statistics.median(one['memory/device_megabytes'] for one in part):.3f}",
            f"{last['entries']:,}",
            f"{last['compile/traces']}",
            f"{statistics.mean(one['loss'] for one in part):.4f}",
            f"{last['validation']:.4f}",
        ]
        print(f"| {' | '.join(cells)} |")
    print(f"\n{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
