"""The line of the user's code that a process is at, sent to the others with its heartbeats.

A process that waits for another one to come to the same point can so tell a slow one from one that
waits for it in turn: it reads what all processes have to compute.
"""

from __future__ import annotations

import json
import linecache
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from xla_dtensor.base.source_line import is_users


@dataclass(frozen=True)
class Whereabouts:
    """Where a process is.

    Attributes:
        reads_for: for how many seconds it has waited for a value that all compute; 0 if it doesn't.
        line: the user's line that it executes.
    """

    reads_for: float
    line: str

    def text(self) -> str:
        """As a text for the key-value store."""
        return json.dumps([round(self.reads_for, 1), self.line])


class _Reading:
    """Which thread waits for a value that all compute, and since when."""

    thread: int | None = None
    since = 0.0


_reading = _Reading()


@contextmanager
def reading() -> Iterator[None]:
    """For the time of a block, this thread waits for a value that all processes compute."""
    _reading.since, _reading.thread = time.monotonic(), threading.get_ident()
    try:
        yield
    finally:
        _reading.thread = None


def read(text: str) -> Whereabouts:
    """What `Whereabouts.text` has written."""
    return Whereabouts(*json.loads(text))


def here() -> Whereabouts:
    """Where this process is now; asked from a thread that looks on."""
    thread, since = _reading.thread, _reading.since
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    line = ""
    if frame is not None:
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        line = f"at {frame.f_code.co_filename}:{frame.f_lineno}: {text}"
    return Whereabouts(0.0 if thread is None else time.monotonic() - since, line)
