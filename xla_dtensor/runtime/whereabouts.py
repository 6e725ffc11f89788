"""What the main thread of a process is at: told to the others with its signs of life.

A process that waits for another one to come to the same point can so tell a slow one from one that
waits for it in turn, in a collective.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType

from xla_dtensor.base.source_line import is_users

_COMPILING = os.path.join("jax", "_src", "compiler.py")
_JAX = (os.path.join("jax", "_src") + os.sep, os.path.join("xla_dtensor", "runtime") + os.sep)


@dataclass(frozen=True)
class Whereabouts:
    """Where a main thread is.

    Attributes:
        in_xla: whether it waits for XLA, other than for a compilation.
        seconds: for how long it has been at the same place.
        line: the user's line that has brought it there.
    """

    in_xla: bool
    seconds: float
    line: str

    def text(self) -> str:
        """As a text for the key-value store."""
        return json.dumps([self.in_xla, round(self.seconds, 1), self.line])


def read(text: str) -> Whereabouts:
    """What `Whereabouts.text` has written."""
    return Whereabouts(*json.loads(text))


class Observer:
    """Looks at the main thread from another one, now and then."""

    def __init__(self) -> None:
        self._place: tuple[object, ...] = ()
        self._since = time.monotonic()

    def look(self) -> Whereabouts:
        """Where it is now."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        frames: list[FrameType] = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        # The same instruction of all callers, too: a loop comes by again.
        place = tuple((id(frame), frame.f_lasti) for frame in frames)
        if place != self._place:
            self._place, self._since = place, time.monotonic()
        files = [frame.f_code.co_filename for frame in frames[:12]]
        compiling = any(file.endswith(_COMPILING) for file in files)
        in_xla = bool(files) and any(part in files[0] for part in _JAX) and not compiling
        line = ""
        for own in frames:
            if is_users(own.f_code.co_filename):
                text = linecache.getline(own.f_code.co_filename, own.f_lineno).strip()
                line = f"at {own.f_code.co_filename}:{own.f_lineno}: {text}"
                break
        return Whereabouts(in_xla, time.monotonic() - self._since, line)
