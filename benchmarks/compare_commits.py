"""Eager and compiled calls of two commits, in one run.

Each commit has a worktree and a process of its own; the two take turns, and a ratio is the median
over rounds of the ratio of their times, so that a slow moment of the machine weighs on both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkouts import ROOT, checkout

WIDTH, LAYERS = 32, 8


def cases() -> dict[str, tuple[int, Callable[[], Any]]]:
    """What is timed: how many calls make a measurement, and the call."""
    import torch
    from torch import nn
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import xla_dtensor as xd

    torch.manual_seed(0)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))

    def sharded(*shape: int) -> torch.Tensor:
        return distribute_tensor(torch.randn(shape), mesh, [Shard(0), Replicate()])

    def model() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(LAYERS))
        )
        xd.distribute_module(made, mesh)
        return made, torch.optim.AdamW(made.parameters(), lr=1e-3)

    x, y, w = sharded(8, WIDTH), sharded(8, WIDTH), sharded(WIDTH, WIDTH)
    eager, eager_optimizer = model()
    compiled, compiled_optimizer = model()

    def backward() -> None:
        eager(x).square().mean().backward()

    def train() -> torch.Tensor:
        loss = compiled(x).square().mean()
        loss.backward()
        compiled_optimizer.step()
        compiled_optimizer.zero_grad()
        return loss.detach()

    step = xd.compile(train)

    def first_calls() -> None:
        fresh = xd.compile(train)
        fresh()
        fresh()

    return {
        "eager: x + y": (200, lambda: x + y),
        "eager: x @ w": (200, lambda: x @ w),
        "eager: x[:, 2:5].sum(0)": (100, lambda: x[:, 2:5].sum(0)),
        "eager: x.mul_(1.0)": (200, lambda: x.mul_(1.0)),
        "eager: forward and backward": (3, backward),
        "eager: AdamW step, 32 parameters": (10, eager_optimizer.step),
        "compiled: training step": (50, step),
        "compiled: first two calls, programs known": (1, first_calls),
    }


def work() -> None:
    """One side: measures a case whenever its name is asked for."""
    import xla_dtensor as xd

    assert Path(xd.__file__).is_relative_to(Path.cwd()), "another checkout's"
    known = cases()
    for _, call in known.values():
        call()
        call()
    print(json.dumps(list(known)), flush=True)
    for line in sys.stdin:
        count, call = known[line.strip()]
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        elapsed = (time.perf_counter() - start) / count
        del result
        print(elapsed, flush=True)


class Side:
    """The process of one commit."""

    def __init__(self, checkout: Path) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(checkout),
            "JAX_NUM_CPU_DEVICES": "8",
            "JAX_PLATFORMS": "cpu",
            "NPROC": "64",
            "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=checkout,
        )
        self.cases: list[str] = json.loads(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a worker has ended; its error is above")
        return line

    def measure(self, case: str) -> float:
        """Seconds per call."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(base: str, rounds: int) -> None:
    """Print the table for ``base`` and the files as they are here."""
    with checkout(base) as files:
        sides = [Side(files), Side(ROOT)]
        times: dict[str, list[tuple[float, float]]] = {case: [] for case in sides[0].cases}
        for number in range(rounds):
            for case, found in times.items():
                order = sides if number % 2 else sides[::-1]
                taken = {side: side.measure(case) for side in order}
                found.append((taken[sides[0]], taken[sides[1]]))
        for side in sides:
            side.close()
    report(base, rounds, times)


def report(base: str, rounds: int, times: dict[str, list[tuple[float, float]]]) -> None:
    """Print a table."""
    print(f"| median of {rounds} rounds | {base} | here | ratio (10th to 90th percentile) |")
    print("|---|---:|---:|---:|")
    for case, found in times.items():
        before, after = (statistics.median(side) * 1e6 for side in zip(*found, strict=True))
        ratios = sorted(now / then for then, now in found)
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        ratio = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
        print(f"| {case} | {before:.0f} us | {after:.0f} us | {ratio} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", nargs="?", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work()
    elif args.base is None:
        parser.error("which commit?")
    else:
        compare(args.base, args.rounds)


if __name__ == "__main__":
    main()
