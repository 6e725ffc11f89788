"""The `World` of the calling process or thread: set by `hvd.init()`, read by every function."""

from __future__ import annotations

import threading
from typing import Any


class _OfProcess:
    world: Any = None


class _OfThread(threading.local):
    world: Any = None
    left: Any = None  # of a thread of `hvd.run` that has called shutdown()


_of_process, _of_thread = _OfProcess(), _OfThread()


def current() -> Any:
    """The ranks as the caller sees them.

    Raises:
        ValueError: ``hvd.init()`` hasn't been called.
    """
    found = current_or_none()
    if found is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return found


def current_or_none() -> Any:
    """The ranks as the caller sees them; None before ``hvd.init()``."""
    if _of_thread.left is not None:
        return None
    return _of_thread.world or _of_process.world


def enter(world: Any) -> None:
    """Let the process be one of these ranks, or none any more."""
    _of_process.world = world


def of_thread() -> Any:
    """What the thread was given, whether it has left it or not."""
    return _of_thread.world


def enter_thread(world: Any) -> None:
    """Let this thread be one of these ranks."""
    _of_thread.world, _of_thread.left = world, None


def leave_thread() -> None:
    """Let this thread be none until it comes back by ``enter_thread``."""
    _of_thread.left = _of_thread.world
