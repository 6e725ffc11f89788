"""The script of `launched` in two of Ray Train's workers.

python -m tests.horovod.programs.in_ray FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def train_loop(config: dict[str, Any]) -> None:
    import xla_dtensor.horovod as hvd
    from tests.horovod.programs import elastic, launched

    folder = Path(config["folder"])
    if not (folder / "killed").exists():
        launched.main()
    found = elastic.main(folder, victim=1)
    (folder / f"rank{hvd.rank()}").write_text(f"{found} of {hvd.size()}")


def main(folder: str) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from xla_dtensor.integration.ray import trainer

    ray.init(num_cpus=2, include_dashboard=False)
    run = RunConfig(
        storage_path=f"{folder}/ray",
        failure_config=FailureConfig(max_failures=1),
        worker_runtime_env={"env_vars": {"XLA_DTENSOR_HEARTBEAT_TIMEOUT": "8"}},
    )
    config = {"folder": folder}
    scaling = ScalingConfig(num_workers=2)
    trainer(train_loop, scaling, run_config=run, train_loop_config=config).fit()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
