"""A training that raises: ``python -m tests.elastic.programs.failing FOLDER HOW PROCESSES``.

How: "always", "once", "together" (all processes of the first start), "other text" (another one each
time), "diverge" (the processes do different things), "exit" (with a text), "one exits" (process 1
does, the other waits for it), "exit 0" or "never". Then it counts to ten in steps of a tenth of a
second, with a checkpoint at the end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import xla_dtensor as xd


def train(devices: int) -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    with (folder / "calls").open("a") as calls:
        calls.write(f"{devices}\n")
    times = len((folder / "calls").read_text().splitlines())
    if how == "always" or (how == "once" and times == 1):
        raise KeyError("no such thing")
    if how == "together" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise KeyError("no such thing")
    if how == "other text":
        raise RuntimeError(f"process {os.getpid()} can't at {time.time()}")
    if how.startswith("exit") or (how == "one exits" and xd.distributed.process_index()):
        sys.exit(0 if how == "exit 0" else f"no data found by {os.getpid()}")
    if how in ("diverge", "one exits"):
        mesh = xd.init_device_mesh("xla", (devices,))
        x = xd.distribute_tensor(torch.ones(devices), mesh, [xd.Shard(0)])
        if xd.distributed.process_index():
            print(x.sin().sum().item())
        else:
            print(x.cos().sum().item())
    counted = {"to": 0}
    with xd.checkpoint.CheckpointManager(folder / "disk", {"counted": counted}) as manager:
        for i in range(manager.restore(), 10):
            counted["to"] = i + 1
            print(f"counted to {i + 1}", flush=True)
            if manager.after_step(i + 1):
                return
            time.sleep(0.3)
    print("done", flush=True)


if __name__ == "__main__":
    xd.elastic.run(train, processes_per_host=int(sys.argv[3]))
