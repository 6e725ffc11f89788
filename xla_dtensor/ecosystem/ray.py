"""Ray Train: its ``JaxTrainer`` starts the processes, and restarts them when one is lost.

It places them on machines, TPU slices or GPUs. Needs ``pip install xla-dtensor[ray]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


def trainer(
    train_loop: Callable[..., Any],
    scaling_config: Any,
    *,
    run_config: Any = None,
    simulated_devices: int | None = None,
    **kwargs: Any,
) -> Any:
    """A ``ray.train.v2.jax.JaxTrainer`` whose workers are the processes of one program: the first
    mesh that ``train_loop`` makes has the devices of all of them.

    Args:
        train_loop: what each worker runs, with ``train_loop_config`` if that is given.
        scaling_config: a ``ray.train.ScalingConfig``: ``use_tpu`` with a topology, ``use_gpu`` with
            ``resources_per_worker``, or neither for CPUs.
        run_config: a ``ray.train.RunConfig``; its ``failure_config`` says how often to start again.
        simulated_devices: of CPU workers, how many devices each simulates; by default as many as
            the first mesh asks for.
        kwargs: further arguments of ``JaxTrainer``, ``train_loop_config`` for example.

    Returns:
        the trainer; ``fit()`` runs it.

    Raises:
        ImportError: Ray isn't installed.
        ValueError: simulated devices on TPUs or GPUs.

    Example::

        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from xla_dtensor.ecosystem.ray import trainer

        run = RunConfig(failure_config=FailureConfig(max_failures=3))
        trainer(train_loop, ScalingConfig(num_workers=2), run_config=run).fit()
    """
    from ray.train import RunConfig
    from ray.train.v2.jax import JaxTrainer
    from ray.train.v2.jax.config import JaxConfig

    on_cpu = not (scaling_config.use_tpu or scaling_config.use_gpu)
    if not on_cpu:
        if simulated_devices is not None:
            raise ValueError("simulated_devices is for workers on CPUs")
        return JaxTrainer(
            train_loop, scaling_config=scaling_config, run_config=run_config, **kwargs
        )
    # Ray joins the processes of TPU and GPU workers only; JAX_PLATFORMS says which these are.
    run_config = run_config or RunConfig()
    runtime = dict(run_config.worker_runtime_env or {})
    devices = {} if simulated_devices is None else {"JAX_NUM_CPU_DEVICES": str(simulated_devices)}
    runtime["env_vars"] = {"JAX_PLATFORMS": "cpu", "NPROC": "64", **devices} | dict(
        runtime.get("env_vars", {})
    )
    return JaxTrainer(
        train_loop,
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=scaling_config,
        run_config=dataclasses.replace(run_config, worker_runtime_env=runtime),
        **kwargs,
    )
