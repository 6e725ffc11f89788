"""Two processes, of which one comes later to their first collective than Gloo waits, 30 s:
`python -m tests.runtime.programs.late WHEN`, where it is late in ``compiling`` or in ``launching``.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.compilation.program.executable import Executable
from xla_dtensor.compilation.program.program import Program

LATE = 40.0


def main(when: str) -> None:
    mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("x",))
    # Nothing is sent, so that the step has the first collective.
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)], src_data_rank=None)
    owner, name = (Executable, "_compile") if when == "compiling" else (Program, "_launch")
    function = getattr(owner, name)

    def late(*args: Any) -> Any:
        time.sleep(LATE)
        return function(*args)

    if xd.distributed.process_index() == 1:
        setattr(owner, name, late)
    step = xd.compile(lambda x: (x * 2).sum())
    print("the value is", step(x).item())


if __name__ == "__main__":
    main(sys.argv[1])
