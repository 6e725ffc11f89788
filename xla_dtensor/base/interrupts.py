"""Ctrl-C comes between operations, never into the middle of one.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. In the middle of several
assignments that leaves tensors half written; in Python that C++ calls from ``noexcept`` functions
it ends the process; in a weak reference's callback it gets lost. So functions that must not be left
halfway say so here, and a handler of SIGINT looks at the stack that it interrupts:

- in an `atomic` function the interrupt waits until the function is done;
- in a `completed` one (a backward pass, an optimizer's step) likewise, but who presses Ctrl-C again
  gets it in the next Python inside that isn't atomic (a hook, the optimizer's own);
- in an `interruptible` function called by a completed one (user code that takes long), and
  everywhere else, what handled SIGINT before is called.

Marking costs a call nothing: the handler knows functions by their code objects.

That is not enough, because between the user's Python and ours there is torch's C++, and it looks
for signals too: with every operation that autograd records it asks our device guard, in a
``noexcept`` function, through pybind11, whose ``str()`` handles signals (``PyObject_Str``). The
handler sees the user's frame, as if that were all. So it raises nothing itself. It has the frame
traced (``sys.settrace``), and raises when the frame gets to its next instruction: then C++ is done
with the operation, version counters and graph included. A call that waits (``time.sleep``,
``input``) never gets there, but goes on waiting when its signal handler hasn't raised: therefore
the signal is sent again a little later, and if nothing at all has happened since, it is raised.

The handler is put around whatever handles SIGINT, in the main thread, when an operation finds
another one in place. So handlers that the user, Jupyter or asyncio install, before or after, keep
working; where SIGINT is ignored, or left to the system, it stays so. Checked on Python 3.11.
"""

from __future__ import annotations

import _signal  # signal.getsignal makes an enum of each answer, which takes ten times as long
import _thread
import enum
import gc
import os
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Kind(enum.Enum):
    ATOMIC = enum.auto()
    COMPLETED = enum.auto()
    INTERRUPTIBLE = enum.auto()


_kinds: dict[types.CodeType, _Kind] = {}
_AGAIN_S = 0.05
_HINT = (
    b"xla_dtensor: Ctrl-C will be raised as soon as the operation that runs is done (it may be "
    b"compiling). Ctrl-\\ ends the process at once.\n"
)


def atomic(function: _Function) -> _Function:
    """Let no interrupt in while ``function`` runs, or what it calls. (A decorator.)

    Not for generators: their frame is not on the stack while the block of a ``with`` runs.
    """
    return _mark(function, _Kind.ATOMIC)


def atomic_methods(cls: type) -> type:
    """Make all functions of a class `atomic`: C++ calls them, and takes an interrupt that is raised
    in one for an error of what it was asked to do. (A decorator.)"""
    for member in vars(cls).values():
        for function in (member, getattr(member, "fget", None)):
            if isinstance(function, types.FunctionType):
                atomic(function)
    return cls


def completed(function: _Function) -> _Function:
    """Let a first interrupt wait until ``function`` is done. A second one may be raised in Python
    that ``function`` calls, so it must be able to deal with exceptions from there; but not in the
    very frame of ``function``."""
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
        # C++ may be asking the device guard while an exception is on its way.
        put_error_aside()
        waiting = _waiting
        if waiting.raising:  # the user's handler, which this one has called, calls an earlier one
            self.previous(signum, frame)
            return
        again, waiting.sent_again = waiting.sent_again, False
        if again and not waiting.count:
            return  # raised in the meantime
        if not again:
            waiting.count += 1
        forced = waiting.count > 1
        outside = _outside(frame, forced)
        if outside is not frame and waiting.count == 2 and not again:
            os.write(2, _HINT)  # not print: the signal may have come in the middle of one
        if outside is None:  # the interpreter ends
            return
        where = outside, outside.f_lasti
        debugger = sys.gettrace() not in (None, _see_calls)  # it, too, needs the one there is
        if outside is frame and (debugger or (again and where == waiting.where)):
            self._raise(signum, frame)
            return
        waiting.where = where if outside is frame else None
        if not debugger:
            self._trace(outside, signum)
        _send_again()

    def _raise(self, signum: int, frame: types.FrameType) -> None:
        _waiting.count = 0
        _waiting.where = None
        if sys.gettrace() is _see_calls:
            sys.settrace(None)
        _waiting.raising = True
        try:
            self.previous(signum, frame)
        finally:
            _waiting.raising = False

    def _trace(self, frame: types.FrameType, signum: int) -> None:
        """Raise with the next instruction of ``frame``."""

        def raise_(at: types.FrameType, event: str, arg: Any) -> Any:
            if at is not frame:  # another one, traced for an earlier signal
                return None
            at.f_trace = None
            at.f_trace_opcodes = False
            if _waiting.count and _outside(at, forced=True) is at:
                self._raise(signum, at)
            return None

        frame.f_trace = raise_
        frame.f_trace_opcodes = True
        sys.settrace(_see_calls)


def _see_calls(frame: types.FrameType, event: str, arg: Any) -> None:
    """Notes that Python has called something: nobody is just waiting."""
    if frame.f_code.co_filename != __file__:  # the handler
        _waiting.where = None


class _Waiting:
    count = 0  # interrupts that came since one was raised
    sent_again = False  # the next one that comes is one of those
    thread = False  # a thread is about to send it
    raising = False  # what handled SIGINT before is at work
    # The frame that the last one is to be raised in, and its instruction; None: it has gone on.
    where: tuple[types.FrameType, int] | None = None


_waiting = _Waiting()


def _outside(frame: types.FrameType | None, forced: bool) -> types.FrameType | None:
    """The innermost frame on the stack in which an interrupt may be raised: ``frame`` itself, or
    one that called a function that must not be left."""
    outside = frame
    is_open = False
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code)
        # An exception in a destructor, or a callback of the garbage collector, gets lost.
        if kind is _Kind.ATOMIC or code.co_name == "__del__" or code in callbacks:
            outside, is_open = frame.f_back, False
        elif kind is _Kind.INTERRUPTIBLE:
            is_open = True
        elif kind is _Kind.COMPLETED and not is_open and (not forced or frame is outside):
            outside = frame.f_back
        frame = frame.f_back
    return outside


_collections: list[Any] = [
    weakref.WeakKeyDictionary(),
    weakref.WeakValueDictionary(),
    weakref.WeakSet(),
]
for _collection in _collections:
    atomic(_collection._remove)


def _send_again() -> None:
    if not _waiting.thread:
        _waiting.thread = True
        # Not threading.Thread, whose locks the interrupted code may hold.
        _thread.start_new_thread(_send, ())


def _send() -> None:
    time.sleep(_AGAIN_S)
    _waiting.thread = False
    if _waiting.count:
        _waiting.sent_again = True
        # To the thread, not only noted as by _thread.interrupt_main: it may be waiting by now.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]


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
