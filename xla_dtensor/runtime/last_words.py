"""What a process says when it ends, since another one has: who that was, and where both were."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any

from xla_dtensor.base.source_line import is_users
from xla_dtensor.runtime import processes, user_positions


class _Said:
    """Whether this process has said that it ends."""

    happened = False


_said = _Said()


def say(text: str) -> None:
    """Say why this process ends, and where it is."""
    _said.happened = True
    me, own = processes.known(processes.index()), str(user_positions.here())
    own = f"\n  this one is {own}" if own else ""
    os.write(2, f"xla_dtensor: {me} ends, since {text}{own}\n".encode())


def are_said() -> bool:
    """Whether this process has said why it ends: nothing is to come after that."""
    return _said.happened


def coordinator() -> str:
    """Process 0, for the beginning of a message."""
    return f"{processes.known(0)}, which coordinates,"


def last_line(sign: str) -> str:
    """Where a process was at its last sign of life, for the end of a message."""
    where = str(user_positions.read(sign.partition(" ")[2])) if sign else ""
    return f"\n  it was last seen {where}" if where else ""


def line(trace: Any) -> str:
    """The user's line of a traceback, for the end of a message."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if is_users(frame.filename)] or list(frames)
    return f"\n  at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


def cut(trace: Any) -> None:
    """Leave out of a traceback what comes below the user's frames: nothing is wrong there."""
    last = None
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            last = trace
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None


def say_when_aborted(sign_of_first: Callable[[], str]) -> None:
    """Name process 0 when it is gone: JAX ends the others at once then, by ``abort()`` in a thread
    of its own, and says that a "leader" is. No Python of ours comes before that, except as the
    handler of the signal; that of a debugger (faulthandler) stays. It may do what a thread may: it
    runs in one of JAX's, which waits for the interpreter's lock as any thread does.

    Args:
        sign_of_first: gives process 0's last sign of life.
    """
    global _handler
    handler_type = ctypes.CFUNCTYPE(None, ctypes.c_int)

    def aborted(signal_number: int) -> None:
        why = "JAX has ended it, as it says above"
        host, _, port = processes.coordinator().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
        except (OSError, ValueError):
            why = f"{coordinator()} is gone{last_line(sign_of_first())}"
        say(why)

    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    _handler = handler_type(aborted)
    previous = library.signal(signal.SIGABRT, ctypes.cast(_handler, ctypes.c_void_p))
    if previous:
        library.signal(signal.SIGABRT, previous)


_handler: Any = None  # lives as long as the process
