"""Two of Ray Train's workers on this machine, started again once if one is killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def fit(train_loop: Callable[[dict[str, Any]], None], folder: str, heartbeat: int) -> None:
    """Run ``train_loop({"folder": folder})`` in both; Ray's own files are in the folder, too.

    Args:
        heartbeat: seconds after which a worker that says nothing is taken for dead.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from xla_dtensor.ecosystem.ray import trainer

    ray.init(num_cpus=2, include_dashboard=False)
    run = RunConfig(
        storage_path=f"{folder}/ray",
        failure_config=FailureConfig(max_failures=1),
        worker_runtime_env={"env_vars": {"XLA_DTENSOR_HEARTBEAT_TIMEOUT": str(heartbeat)}},
    )
    config = {"folder": folder}
    scaling = ScalingConfig(num_workers=2)
    trainer(train_loop, scaling, run_config=run, train_loop_config=config).fit()
    ray.shutdown()
