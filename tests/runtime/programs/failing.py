"""Two processes, of which one does something else: `python -m tests.runtime.programs.failing HOW`.

The loop is one that would run for minutes; the process numbered `XLA_DTENSOR_TEST_VICTIM` (1) is
the one that fails.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd


def main(how: str) -> None:
    me = xd.distributed.process_index()
    victim = me == int(os.environ.get("XLA_DTENSOR_TEST_VICTIM", "1"))
    mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("x",))
    other_mesh = xd.init_device_mesh("xla", (4, 2) if victim and how == "mesh" else (2, 4))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    step = xd.compile(lambda x: (x * 2).sum())
    for i in range(1000):
        if i == 3 and victim:
            print("now", flush=True)
            fail(how, x)
        if i == 3 and how == "order":
            x.sin()
            x.cos()
        if i == 3 and how == "mesh":
            distribute_tensor(torch.ones(8, 8), other_mesh, [Shard(0), Shard(1)]).neg()
        if how == "step" and victim and i == 3:
            step = xd.compile(lambda x: (x * 3).sum())
        step(x).item()
        time.sleep(0.05)
    sys.exit("nobody has noticed")


def fail(how: str, x: torch.Tensor) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "raise":
        raise ValueError("a bad batch")
    if how == "operation":
        x.exp()  # the other one doesn't
    if how == "order":
        x.cos()
        x.sin()
    if how == "read":
        print(x)
    if how == "seed":
        torch.manual_seed(1)
    if how == "leave":
        sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
