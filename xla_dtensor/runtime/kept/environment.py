"""All that a program depends on beside what it computes: versions, sources, flags, the device."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from enum import Enum
from pathlib import Path
from typing import Any

from xla_dtensor.base import jax_private
from xla_dtensor.runtime.program_cache import machine

# By which XLA and LLVM compile, beside the flags that XLA says it has. The number of threads
# decides into how many parts XLA's CPU compiler cuts a loop.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC")
# Settings of JAX by parts of their names that don't say what a program is.
_ELSEWHERE = ("cache", "traceback", "logging", "log_", "num_cpu_devices", "platforms")
_PLAIN = (bool, int, float, str, tuple, Enum, type(None))

_IMPORTED = time.time()  # with the lowerings

_last: tuple[Any, str] = (None, "")  # what was so when it was asked for last, and the digest


def words(device: Any) -> str | None:
    """Digest of it, for programs of ``device``, as it is now; None if nobody can say."""
    global _last
    if _sources() is None:
        return None
    import jax

    settings, context = [jax.config.values[name] for name in _settings()], trace_context()
    now = device, settings, context
    known, digest = _last
    if known != now:
        # Of contexts that JAX keeps as objects the class will do: nothing is compiled in those.
        words = [repr(v) if isinstance(v, _PLAIN) else str(type(v)) for v in context]
        named = list(zip(_settings(), settings, strict=True))
        digest = hashlib.sha256(f"{_of_process(device)}\n{named}\n{words}".encode()).hexdigest()
        _last = now, digest
    return digest


def trace_context() -> Any:
    """JAX's settings of this thread on which a traced program depends; equal ones are equal."""
    return jax_private.trace_context()


def forget() -> None:
    """Look at everything anew."""
    global _last
    _last = None, ""
    for known in (_settings, _of_process, _sources):
        known.cache_clear()


@functools.cache
def _settings() -> list[str]:
    """The names of those of JAX's settings that may matter."""
    import jax

    return sorted(n for n in jax.config.values if not any(part in n for part in _ELSEWHERE))


@functools.cache
def _of_process(device: Any) -> str:
    """What doesn't change while JAX runs."""
    import jax
    import jaxlib
    import numpy
    import torch

    versions = [jax.__version__, jaxlib.__version__, torch.__version__, numpy.__version__]
    client = device.client
    about = [client.platform, client.platform_version, device.device_kind, device.id]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    variables, flags = list(map(os.environ.get, _VARIABLES)), jax_private.xla_flags()
    return repr([sys.version, versions, _sources(), about, machine(), cores, variables, flags])


@functools.cache
def _sources() -> str | None:
    """Of this package's Python, every line of which may be part of how something is lowered. None
    if that isn't what runs: it was edited since, or isn't there (a program without sources)."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    paths = sorted(root.rglob("*.py"))
    for path in paths:
        if path.stat().st_mtime > _IMPORTED:
            return None
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest() if paths else None
