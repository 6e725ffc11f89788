"""Two Ray workers of four devices train; one kills itself, and Ray starts both again.

python -m tests.integration.ray_program FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path


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


def main(folder: str) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from xla_dtensor.integration.ray import trainer

    ray.init(num_cpus=2, include_dashboard=False)
    run = RunConfig(
        storage_path=f"{folder}/ray",
        failure_config=FailureConfig(max_failures=1),
        worker_runtime_env={"env_vars": {"XLA_DTENSOR_HEARTBEAT_TIMEOUT": "5"}},
    )
    config = {"folder": folder}
    scaling = ScalingConfig(num_workers=2)
    trainer(train_loop, scaling, run_config=run, train_loop_config=config).fit()
    ray.shutdown()
    print("all of it")


if __name__ == "__main__":
    main(sys.argv[1])
