"""Processes on hosts of a network that is cut while they do something, again and again:
`python -m tests.runtime.programs.cut_off WHAT FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.checkpoint import CheckpointManager


def main(what: str, folder: Path) -> None:
    devices = 2 * xd.distributed.process_count()
    mesh = xd.init_device_mesh("xla", (devices,), mesh_dim_names=("x",))
    x = distribute_tensor(torch.ones(512, 1024 * devices), mesh, [Shard(1)])
    w = distribute_tensor(torch.ones(1024 * devices, 512), mesh, [Shard(0)])
    product = lambda x, w: (x @ w).sum()  # product
    compiled = xd.compile(product)
    manager = CheckpointManager(folder / "c", {"s": {"w": w}}, keep_last=2, asynchronous=False)

    def once(number: int) -> None:
        if what == "compiled":
            compiled(x, w).item()  # compiled
        elif what == "eager":
            product(x, w).item()  # eager
        elif what == "saving":
            manager.save(number)  # saving
        elif what == "loading":
            manager.restore()  # loading
        elif what == "alone":
            product(torch.ones(512, 512), torch.ones(512, 512)).item()

    if what == "loading":
        manager.save(1)
    once(2)
    (folder / f"ready{xd.distributed.process_index()}").touch()
    for number in range(3, 10**6):
        once(number)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
