"""Save a small model's step, or load it and train, in however many processes: losses, in hex, and
how many programs were compiled.

python -m tests.runtime.programs.saved save|compile|load PATH
python -m tests.runtime.programs.saved wait -    # for a PATH, having started the devices
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import xla_dtensor as xd
from tests.planning.test_plan import step_of

STEPS = 3


def training(hidden: int = 32) -> tuple[Any, Any]:
    """A step, and a batch for it, on a 2x4 mesh."""
    torch.manual_seed(0)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(16, hidden), nn.Dropout(0.1), nn.GELU(), nn.Linear(hidden, 8))
    xd.distribute_module(model, mesh)
    batch = xd.distribute_tensor(torch.randn(8, 16), mesh, [xd.Shard(0), xd.Replicate()])
    return xd.compile(step_of(model)), batch


def losses(step: Any, batch: Any) -> list[str]:
    return [step(batch).item().hex() for _ in range(STEPS)]


def unwatched(x: torch.Tensor) -> torch.Tensor:
    """A step of tensors on no mesh."""
    return x * 2


def own_step(path: str) -> None:
    """A step on no mesh is each process's own, and so is its file."""
    path += str(xd.distributed.process_index())
    x = torch.arange(4.0, device="xla")
    xd.compile(unwatched).save_compiled(path, x)
    step = xd.compile(unwatched)
    xd.load_compiled(path, step, trusted=True)
    assert step(x).tolist() == [0, 2, 4, 6] and step.compilations == 0


def main() -> None:
    what, path = sys.argv[1:]
    if what == "load first":  # nothing has asked for devices yet
        unwatched.__qualname__ = "step_of.<locals>.train"
        xd.load_compiled(path, xd.compile(unwatched), trusted=True)
    step, batch = training()
    if what == "wait":
        step(batch).item()
        step, batch = training()
        print("ready", flush=True)
        path = sys.stdin.readline().strip()
    if what == "load own":
        path += f"/{xd.distributed.process_index()}"
    if what == "save":
        step.save_compiled(path, batch)
    elif what != "compile":
        xd.load_compiled(path, step, trusted=True)
    found = losses(step, batch)
    print("losses", *found, file=sys.stderr)
    print("compilations", step.compilations, file=sys.stderr)
    if what == "save":
        own_step(path)


if __name__ == "__main__":
    main()
