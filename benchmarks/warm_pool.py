"""How soon a training's first step is done: compiled in processes that start, loaded from a file in
processes that start, and loaded in processes that wait for it, a warm pool.

    python benchmarks/warm_pool.py                  # --processes 2, --layers 8, --runs 3

Residual blocks of width 256 with AdamW on a 2x4 mesh of simulated devices, which the processes
share. Nothing but the file is kept between runs. The clock runs from the start of the processes, or
from the word to those that wait, to the first loss, which has to be the same bit for bit.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any


def training(width: int, layers: int) -> tuple[Any, Any]:
    """A step, and a batch for it."""
    import torch
    from torch import nn

    import xla_dtensor as xd

    torch.manual_seed(0)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    blocks = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        for _ in range(layers)
    )
    xd.distribute_module(blocks, mesh)
    optimizer = torch.optim.AdamW(blocks.parameters())

    def train(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = x + block(x)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = xd.distribute_tensor(torch.randn(32, width), mesh, [xd.Shard(0), xd.Replicate()])
    return xd.compile(train), batch


def work(warm: bool) -> None:
    """What each process does: it waits for a job, ``save``, ``compile`` or ``load``."""
    if warm:  # the devices are there, and all is imported that a training imports
        step, batch = training(8, 1)
        step(batch).item()
    print("pool: ready", file=sys.stderr)
    what, path, layers = sys.stdin.readline().split()
    step, batch = training(256, int(layers))
    if what == "save":
        step.save_compiled(path, batch)
    elif what == "load":
        step.load_compiled(path, trusted=True)
    print("pool:", step(batch).item().hex(), step.compilations, file=sys.stderr)


def line_of(worker: subprocess.Popen[str]) -> str:
    """The next line of a process for the pool: on the other stream, as XLA prints to stdout."""
    assert worker.stderr is not None
    return next(line[6:].strip() for line in worker.stderr if line.startswith("pool: "))


def timed(count: int, job: str, warm: bool) -> tuple[float, str]:
    """Seconds to the first loss; that and how many programs were compiled for it."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    own = {"XLA_DTENSOR_CACHE": "off", "JAX_ENABLE_COMPILATION_CACHE": "false", "NPROC": "64"}
    if count > 1:
        own |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    command = [sys.executable, __file__, "--work", *(["--warm"] if warm else [])]
    began = time.monotonic()
    workers = [
        subprocess.Popen(command, env=os.environ | own | {"RANK": str(rank)}, **pipes)
        for rank in range(count)
    ]
    assert {line_of(worker) for worker in workers} == {"ready"}
    began = time.monotonic() if warm else began
    for worker in workers:
        print(job, file=worker.stdin, flush=True)
    (found,) = {line_of(worker) for worker in workers}
    seconds = time.monotonic() - began
    assert {worker.wait() for worker in workers} == {0}
    return seconds, found


def main() -> None:
    """Print the three times."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    for name, default in {"processes": 1, "layers": 8, "runs": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    ways = {"compiled": ("compile", False), "loaded": ("load", False), "warm": ("load", True)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/step.xla {asked.layers}"
        loss = timed(asked.processes, f"save {file}", False)[1].split()[0]
        for _ in range(asked.runs):
            for way, (what, warm) in ways.items():
                seconds, found = timed(asked.processes, f"{what} {file}", warm)
                assert found == f"{loss} {int(way == 'compiled')}", (way, found, loss)
                times[way].append(seconds)
    for way, some in times.items():
        print(f"{way:10} {statistics.median(some):6.2f} s")


if __name__ == "__main__":
    if "--work" in sys.argv:
        work("--warm" in sys.argv)
    else:
        main()
