"""Conditions on values: recorded when an operation runs, checked later, raised if they don't hold.

A program can't raise. What must hold of values (indices in range, ``torch._assert_async``) is a
*summary*, two integers that a device computes, and a *judge* that makes an exception of them or
None. Summaries wait here until a value is read on the host, which waits for the devices anyway, or
a compiled step looks at them itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from xla_dtensor.base.config import config

Judge = Callable[[int, int], Exception | None]

EAGER = ("eager", "all")
"""The values of ``config.checks`` with which eager operations look."""
COMPILED = ("compiled", "all")
"""Those with which compiled steps do that don't say themselves."""

_WAITING = 256  # summaries: four bytes each, but each is an array of its own


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.waiting: list[tuple[Any, tuple[Judge, ...]]] = []
        self.asked = False


_state = _ThreadState()


def check_indices(enabled: bool) -> None:
    """An old name: whether eager operations look for indices out of range. It sets
    ``config.checks``, and leaves what that says of compiled steps.

    Args:
        enabled: whether they do.
    """
    if config.checks in COMPILED:
        config.checks = "all" if enabled else "compiled"
    else:
        config.checks = "eager" if enabled else "off"


class asking:
    """Let steps that are traced in a block look at indices, or not."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        self._outer = _state.asked
        _state.asked = self._wanted

    def __exit__(self, *exc_info: object) -> None:
        _state.asked = self._outer


def asked() -> bool:
    """Whether a step that is traced in this thread looks at indices."""
    return _state.asked


def later(summaries: Any, judges: tuple[Judge, ...]) -> None:
    """Judge by ``summaries``, an array of two integers per judge, when a value is read next."""
    _state.waiting.append((summaries, judges))
    if len(_state.waiting) > _WAITING:
        look()


def look() -> None:
    """Look at what this thread's operations and steps have left to be judged.

    Raises:
        Exception: the first that a judge makes; the others are forgotten.
    """
    if not _state.waiting:
        return
    waiting, _state.waiting = _state.waiting, []
    for summaries, judges in waiting:
        judge(summaries, judges)


def judge(summaries: Any, judges: tuple[Judge, ...]) -> None:
    """Judge now.

    Raises:
        Exception: the first that a judge makes.
    """
    for (one, other), to_error in zip(np.asarray(summaries).reshape(-1, 2), judges, strict=True):
        error = to_error(int(one), int(other))
        if error is not None:
            raise error
