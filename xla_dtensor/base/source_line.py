"""Whom an operation is for: the user's line that asked for it, and the module."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import sys
import traceback
import types
from collections.abc import Callable

# How programs name a module: ``nn:layers.0.attention``.
FORWARD, BACKWARD, OPTIMIZER = "nn:", "nn_backward:", "nn_optimizer:"
STDLIB = os.path.dirname(os.__file__) + os.sep
_MODULE = re.compile(r"nn(_backward)?:([^/\"]+)")


def user_frame() -> traceback.FrameSummary | None:
    """The innermost frame outside of torch, JAX and this package."""
    for frame in reversed(traceback.extract_stack()):
        # What `dataclasses` makes has no lines.
        made = frame.filename == "<string>" and frame.name.startswith("__")
        if is_users(frame.filename) and not made:
            return frame
    return None


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's, JAX's, Python's nor this package's."""
    if filename.startswith("<frozen"):
        return False  # an import
    path = os.path.abspath(filename)
    return not is_pythons(path) and not path.startswith(_libraries())


def is_pythons(path: str) -> bool:
    """Whether a file is of Python's own library."""
    return path.startswith(STDLIB) and "-packages" + os.sep not in path


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
    frame = _users_frame(sys._getframe(1))
    filename, line = frame.f_code.co_filename, frame.f_lineno
    return lambda: f"\n  at {filename}:{line}: {linecache.getline(filename, line).strip()}"


def expression_here() -> Callable[[], str]:
    """The same for the middle of a message, and of the line only the part that is being evaluated:
    ``range(n + 1) at train.py:12``."""
    frame = _users_frame(sys._getframe(1))
    code, instruction = frame.f_code, frame.f_lasti // 2
    return lambda: _expression(code, instruction)


def _expression(code: types.CodeType, instruction: int) -> str:
    first, last, left, right = next(itertools.islice(code.co_positions(), instruction, None))
    line = linecache.getline(code.co_filename, first or 0)
    text = line.strip()
    if first is not None and first == last and left is not None:  # columns count bytes
        text = line.encode()[left:right].decode(errors="replace") or text
    where = f"{code.co_filename}:{first}"
    return f"{text} at {where}" if text else f"at {where}"


def _users_frame(frame: types.FrameType) -> types.FrameType:
    while frame.f_back is not None and not _is_users_known(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.cache
def _is_users_known(filename: str) -> bool:
    return is_users(filename)


def caller() -> str:
    """``file:line`` of the user's code."""
    frame = user_frame()
    return "unknown" if frame is None else f"{frame.filename}:{frame.lineno}"


def short_path(where: str) -> str:
    """``file:line`` with the file relative to the working directory, if it is in it."""
    inside = os.getcwd() + os.sep
    return where.removeprefix(inside)


def module_in(op_name: str) -> tuple[str, str]:
    """What an operation is for, and in which part of the step.

    Args:
        op_name: XLA's, or a jaxpr's name stack: ``jit(step)/nn:layers.0.wq/dot_general``.

    Returns:
        the module's path and ``"forward"`` or ``"backward"``; ``"optimizer"`` twice; or two "".
    """
    if OPTIMIZER in op_name:
        return "optimizer", "optimizer"
    found = _MODULE.findall(op_name)
    if not found:
        return "", ""
    backward, name = found[-1]
    return name, "backward" if backward else "forward"


def of_equal_layers(module: str) -> str:
    """The name that modules of equal layers share: ``layers.*.wq``."""
    return re.sub(r"\b\d+\b", "*", module) if "." in module else module
