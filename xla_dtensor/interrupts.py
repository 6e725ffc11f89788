"""Ctrl-C comes between operations, never into the middle of one.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. In the middle of several
assignments that leaves tensors half written; in Python that C++ has called from ``noexcept`` code
(the device guard, see `integration/backward.py`) it ends the process; in a weak reference's
callback it gets lost. So functions that must not be left halfway say so here, and a handler of
SIGINT looks at the stack that it interrupts:

- in an `atomic` function the interrupt waits until the function is done;
- in a `completed` one (a backward pass, an optimizer's step) likewise, but who presses Ctrl-C again
  gets it between two of the operations inside;
- in an `interruptible` function called by a completed one (user code that takes long), and
  everywhere else, what handled SIGINT before is called: it comes at once.

Marking costs a call nothing: the handler knows functions by their code objects. An interrupt that
waits is sent again every few milliseconds, so nobody has to look for it at the end of a function,
and it is raised where the user's own code goes on: after C++ is done with the operation, too
(version counters, the graph).

The handler is put around whatever handles SIGINT, in the main thread, when an operation finds
another one in place. So handlers that the user, Jupyter or asyncio install, before or after, keep
working; where SIGINT is ignored, or left to the system, it stays so.
"""

from __future__ import annotations

import _signal  # signal.getsignal makes an enum of each answer, which takes ten times as long
import _thread
import enum
import os
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Kind(enum.Enum):
    ATOMIC = enum.auto()
    COMPLETED = enum.auto()
    INTERRUPTIBLE = enum.auto()


_kinds: dict[types.CodeType, _Kind] = {}
_AGAIN_S = 0.002
_HINT = (
    b"xla_dtensor: Ctrl-C will be raised as soon as the operation that runs is done (it may be "
    b"compiling). Ctrl-\\ ends the process at once.\n"
)


def atomic(function: _Function) -> _Function:
    """Let no interrupt in while ``function`` runs, or what it calls. (A decorator.)

    Not for generators: their frame is not on the stack while the block of a ``with`` runs.
    """
    return _mark(function, _Kind.ATOMIC)


def completed(function: _Function) -> _Function:
    """Let a first interrupt wait until ``function`` is done. A second one is raised inside of it,
    between two operations, so an exception there must be one that ``function`` can deal with. It
    is never raised in the very frame of ``function``."""
    return _mark(function, _Kind.COMPLETED)


def interruptible(function: _Function) -> _Function:
    """Let interrupts in while ``function`` runs, though a `completed` one has called it."""
    return _mark(function, _Kind.INTERRUPTIBLE)


def _mark(function: _Function, kind: _Kind) -> _Function:
    _kinds[function.__code__] = kind
    return function


def ready() -> bool:
    """Whether the handler is in place."""
    return _signal.getsignal(_signal.SIGINT).__class__ is Handler


def install() -> None:
    """Put the handler around the present one. Other threads than the main one can't."""
    current = _signal.getsignal(_signal.SIGINT)
    if (
        current.__class__ is not Handler
        and callable(current)  # not SIG_IGN or SIG_DFL, nor one that C has installed
        and threading.current_thread() is threading.main_thread()
    ):
        _signal.signal(_signal.SIGINT, Handler(current))


class Handler:
    """Handles SIGINT as the module says, with ``previous`` once it may be raised.

    Each installation has one of its own: if a later handler that calls its predecessor is wrapped
    again, the two don't call each other forever.
    """

    def __init__(self, previous: Callable[[int, types.FrameType | None], Any]) -> None:
        self.previous = previous

    def __call__(self, signum: int, frame: types.FrameType | None) -> None:
        # Of the device guard, which may be asked while an exception is pending: see there.
        put_error_aside()
        if _waiting.sent_again:
            _waiting.sent_again = False
        else:
            _waiting.count += 1
            if _waiting.count == 2 and _forbids(frame, forced=True):
                os.write(2, _HINT)  # not print: the signal may have come in the middle of one
        if _forbids(frame, forced=_waiting.count > 1):
            _send_again()
            return
        _waiting.count = 0
        self.previous(signum, frame)


class _Waiting:
    count = 0  # interrupts that came since one was raised
    sent_again = False  # the next one that comes is one of those
    thread = False  # a thread is about to send it


_waiting = _Waiting()


def _forbids(frame: types.FrameType | None, forced: bool) -> bool:
    """Whether an interrupt may not be raised in ``frame``."""
    innermost = frame
    open_here = False
    while frame is not None:
        kind = _kinds.get(frame.f_code)
        if kind is _Kind.ATOMIC:
            return True
        if kind is _Kind.INTERRUPTIBLE:
            open_here = True
        elif kind is _Kind.COMPLETED and not open_here and (not forced or frame is innermost):
            return True
        frame = frame.f_back
    return False


def _send_again() -> None:
    if not _waiting.thread:
        _waiting.thread = True
        # Not threading.Thread, whose locks the interrupted code may hold.
        _thread.start_new_thread(_send, ())


def _send() -> None:
    time.sleep(_AGAIN_S)
    _waiting.thread = False
    _waiting.sent_again = True
    _thread.interrupt_main()


class _Aside(threading.local):
    error: BaseException | None = None


_aside = _Aside()
_EXHAUSTED: Iterator[None] = iter(())


def put_error_aside() -> None:
    """Put aside the exception that is pending in this thread, if one is: C++ is asking Python for
    something while an exception is on its way (`integration/backward.py` says when).

    ``next`` of an exhausted iterator with a default returns the default, unless an exception is
    pending already: then it raises that one.
    """
    try:
        next(_EXHAUSTED, None)
    except BaseException as error:
        _aside.error = error


def take_error() -> BaseException | None:
    """The exception that was put aside last, which is forgotten."""
    error, _aside.error = _aside.error, None
    return error
