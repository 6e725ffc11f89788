"""Two processes, of which one waits for the other in a collective, and one of them is asked where
all are: `python -m tests.runtime.programs.hanging ASKED FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd


def main(asked: int, folder: Path) -> None:
    os.chdir(folder)
    me = xd.distributed.process_index()
    mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("x",))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    step = xd.compile(lambda x: (x * 2).sum())
    step(x).item()
    if me == asked:
        threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    if me == 1:
        end = time.monotonic() + 40
        while not list(folder.glob("*.txt")) and time.monotonic() < end:
            time.sleep(0.05)  # hangs
    step(x).item()  # waits


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
