"""Two processes that compute together, of which one is killed in the middle of it:
`python -m tests.runtime.programs.killed WHERE`.

Products of some size, so that the other one is in their all-reduce, most of the time: it then has
lost a connection, and not just nobody to begin with. The process numbered `XLA_DTENSOR_TEST_VICTIM`
(1) is the one that is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd


def main(where: str) -> None:
    mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("x",))
    x = distribute_tensor(torch.ones(512, 4096), mesh, [Shard(1)])
    w = distribute_tensor(torch.ones(4096, 512), mesh, [Shard(0)])
    product = lambda x, w: (x @ w).sum()
    step = product if where == "eager" else xd.compile(product)
    step(x, w).item()
    if xd.distributed.process_index() == int(os.environ.get("XLA_DTENSOR_TEST_VICTIM", "1")):
        threading.Timer(3.5, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def loop() -> None:
        while True:
            step(x, w).item()

    if where == "another thread":
        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        thread.join()
        time.sleep(60)
    elif where == "caught":
        try:
            loop()
        except xd.DistributedError as error:
            print(f"DistributedError: {error}\nsaved what there is", flush=True)
            sys.exit(1)
    else:
        loop()


if __name__ == "__main__":
    main(sys.argv[1])
