"""Makes operations raise in a forked child of a process in which XLA runs.

XLA's threads are not in the child, and whatever asks its devices there waits for ever.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import Any

from xla_dtensor.base import interrupts

_is_child = False
_clients: list[Any] = []


def watch(clients: Iterable[Any]) -> None:
    """Notice forks from now on; called when XLA starts.

    Args:
        clients: XLA's, of each platform.
    """
    if not _clients:
        os.register_at_fork(after_in_child=_in_child)
    _clients[:] = clients


def _in_child() -> None:
    global _is_child
    _is_child = True
    for client in _clients:  # which, when the child ends, would wait for its threads: a SIGSEGV
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    interrupts.before_operations = refuse
    interrupts.forget()


def is_child() -> bool:
    """Whether this process was forked from one in which XLA ran."""
    return _is_child


def refuse() -> None:
    """Raise because of where we are.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "Cannot use xla tensors in a forked subprocess: XLA's threads stayed behind. Let the "
        "workers of a DataLoader work on CPU tensors and move batches in the main process, or "
        "start them anew (multiprocessing_context='spawn')"
    )
