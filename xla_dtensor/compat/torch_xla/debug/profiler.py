"""Profiles, which JAX takes: names under which torch_xla has it."""

from __future__ import annotations

import time
from typing import Any

import jax


def start_server(port: int) -> Any:
    """Let a profiler take profiles of this process from outside.

    Returns:
        the server, which ends when nothing refers to it.
    """
    return jax.profiler.start_server(port)


def start_trace(logdir: str, **kwargs: Any) -> None:
    """Begin a profile."""
    jax.profiler.start_trace(logdir)


def stop_trace() -> None:
    """End the profile, and write it."""
    jax.profiler.stop_trace()


def trace(service_addr: str, logdir: str, duration_ms: int = 1000, **kwargs: Any) -> None:
    """Take a profile of this process for a while. (torch_xla asks the server at ``service_addr``
    for it, from another thread.)

    Args:
        service_addr: no effect.
        logdir: where it is written.
        duration_ms: how long.
        kwargs: torch_xla's; no effect.
    """
    jax.profiler.start_trace(logdir)
    try:
        time.sleep(duration_ms / 1000)
    finally:
        jax.profiler.stop_trace()


class Trace(jax.profiler.TraceAnnotation):
    """A named part of a profile.

    Example::

        import xla_dtensor.compat.torch_xla.debug.profiler as xp

        with xp.Trace("load"):
            pass
    """


class StepTrace(jax.profiler.StepTraceAnnotation):
    """A step in a profile: ``StepTrace("train", step_num=3)``."""
