"""The script of `launched` in two of Ray Train's workers.

python -m tests.horovod.programs.in_ray FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def train_loop(config: dict[str, Any]) -> None:
    import xla_dtensor.horovod as hvd
    from tests.horovod.programs import launched

    launched.main()
    Path(config["folder"], f"rank{hvd.rank()}").write_text(str(hvd.size()))


def main(folder: str) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig

    from xla_dtensor.integration.ray import trainer

    ray.init(num_cpus=2, include_dashboard=False)
    trainer(
        train_loop,
        ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{folder}/ray"),
        train_loop_config={"folder": folder},
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
