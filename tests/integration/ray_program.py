"""Two Ray workers of four devices train; one kills itself, and Ray starts both again.

python -m tests.integration.ray_program FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests import ray_training


def train_loop(config: dict) -> None:
    import json
    import os
    import signal

    import xla_dtensor as xd
    from tests.runtime.programs import training

    folder = Path(config["folder"])
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    losses = training.global_view(mesh, True)
    me = xd.distributed.process_index()
    attempts = len(list(folder.glob(f"attempt*.{me}")))
    (folder / f"attempt{attempts}.{me}").write_text(
        json.dumps([xd.distributed.process_count(), mesh.size(), losses])
    )
    if attempts == 0 and me == 1:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    ray_training.fit(train_loop, sys.argv[1], heartbeat=5)
    print("all of it")
