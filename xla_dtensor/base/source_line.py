"""Where in the user's code something was called or registered."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import traceback
from collections.abc import Callable


def user_frame() -> traceback.FrameSummary | None:
    """The innermost frame outside of torch, JAX and this package."""
    for frame in reversed(traceback.extract_stack()):
        if is_users(frame.filename):
            return frame
    return None


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's, JAX's nor this package's."""
    if filename.startswith("<frozen"):
        return False  # an import
    return not os.path.abspath(filename).startswith(_libraries())


def _libraries() -> tuple[str, ...]:
    # JAX may not be there yet.
    return _folders(tuple(name for name in ("torch", "jax", "xla_dtensor") if name in sys.modules))


@functools.cache
def _folders(names: tuple[str, ...]) -> tuple[str, ...]:
    files = [sys.modules[name].__file__ for name in names]
    return tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in files if f is not None)


def user_line() -> str:
    """For the end of a message: ``"at train.py:12: loss.item()"`` in a line of its own."""
    frame = user_frame()
    return "" if frame is None else f"\n  at {frame.filename}:{frame.lineno}: {frame.line}"


def here() -> Callable[[], str]:
    """What gives `user_line` of this moment when it is wanted: it costs a few microseconds to
    note where that is, and a hundred times that to say it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_users_known(frame.f_code.co_filename):
        frame = frame.f_back
    filename, line = frame.f_code.co_filename, frame.f_lineno
    return lambda: f"\n  at {filename}:{line}: {linecache.getline(filename, line).strip()}"


@functools.cache
def _is_users_known(filename: str) -> bool:
    return is_users(filename)


def caller() -> str:
    """``file:line`` of the user's code."""
    frame = user_frame()
    return "unknown" if frame is None else f"{frame.filename}:{frame.lineno}"
