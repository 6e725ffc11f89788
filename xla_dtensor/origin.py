"""Where in the user's code something was called or registered."""

from __future__ import annotations

import os
import sys
import traceback


def user_frame() -> traceback.FrameSummary | None:
    """The innermost frame outside of torch, JAX and this package."""
    libraries = tuple(
        os.path.dirname(os.path.abspath(module.__file__)) + os.sep
        for module in map(sys.modules.get, ("torch", "jax", "xla_dtensor"))
        if module is not None and module.__file__ is not None
    )
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith("<frozen"):
            continue  # an import
        if not os.path.abspath(frame.filename).startswith(libraries):
            return frame
    return None


def user_line() -> str:
    """For the end of a message: ``"at train.py:12: loss.item()"`` in a line of its own."""
    frame = user_frame()
    return "" if frame is None else f"\n  at {frame.filename}:{frame.lineno}: {frame.line}"


def caller() -> str:
    """``file:line`` of the user's code."""
    frame = user_frame()
    return "unknown" if frame is None else f"{frame.filename}:{frame.lineno}"
