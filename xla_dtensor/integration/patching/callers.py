"""Decides by the calling module whether ``get_rank()`` asks about processes or devices.

``is_initialized`` and ``get_rank`` are asked about processes and about devices. Elsewhere those are
the same; here one process drives many devices, and what is meant shows from who asks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# Asks whether there are other processes, to share work with them: workers of a DataLoader, files of
# a checkpoint, records of a log. There are none, or JAX's own way is taken.
_ABOUT_PROCESSES: tuple[str, ...] = (
    "torch.utils.",
    "torch.distributed.checkpoint.",
    "xla_dtensor.checkpoint.",
    "xla_dtensor.integration.modules.checkpoints",
    "torch.distributed.c10d_logger",
    "torch.profiler.",
    "torch.autograd.profiler",
)

# Asks for its rank in the default group to know which process it is: the one that logs, or writes.
_ABOUT_ITSELF: tuple[str, ...] = ()

# Asks for its rank in a group to compute with it, by tensor operations alone: a tensor serves.
_ABOUT_DEVICES: tuple[str, ...] = ()

told: list[Callable[[Any, Any], None]] = []
"""Called with each rank that is a tensor, and its group."""


def rank_means_process(*modules: str) -> None:
    """In these modules (and what is in these packages) ``get_rank()`` is the process's number."""
    global _ABOUT_ITSELF
    _ABOUT_ITSELF = tuple(dict.fromkeys((*_ABOUT_ITSELF, *modules)))


def rank_may_be_a_tensor(*modules: str) -> None:
    """In these modules ``get_rank(group)`` is a per-device tensor where devices differ."""
    global _ABOUT_DEVICES
    _ABOUT_DEVICES = tuple(dict.fromkeys((*_ABOUT_DEVICES, *modules)))


def asks_about_processes(depth: int) -> bool:
    """Whether the code ``depth`` calls away asks whether there are other processes."""
    return _is_in(_ABOUT_PROCESSES, depth)


def asks_about_itself(depth: int) -> bool:
    """Whether the code ``depth`` calls away asks which process it is."""
    return _is_in(_ABOUT_ITSELF, depth)


def asks_about_devices(depth: int) -> bool:
    """Whether the code ``depth`` calls away computes with its rank."""
    return _is_in(_ABOUT_DEVICES, depth)


def _is_in(names: tuple[str, ...], depth: int) -> bool:
    caller = sys._getframe(depth + 2).f_globals.get("__name__", "")
    return caller.startswith(names)
