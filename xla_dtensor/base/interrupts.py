"""Delays Ctrl-C (and other signals' exceptions) to between two operations.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. In the middle of several
assignments that leaves tensors half written; in Python that C++ calls from ``noexcept`` functions
it ends the process; in a weak reference's callback it gets lost. So functions that must not be left
halfway say so here, and a handler of SIGINT looks at the stack that it interrupts; so does one for
each of the other signals whose handler in Python may raise: an alarm that limits the time of a
test, the SIGTERM or SIGUSR1 with which a scheduler takes the machine back.

- in an `atomic` function the interrupt waits until the function is done;
- in a `completed` one (a backward pass, an optimizer's step) likewise, but who presses Ctrl-C again
  gets it in the next Python inside that isn't atomic (a hook, the optimizer's own);
- in an `interruptible` function called by a completed one (user code that takes long), with a
  handler that was set in there (a time limit for a hook), and everywhere else, what handled the
  signal before is called.

Marking costs a call nothing: the handler knows functions by their code objects.

That is not enough, because between the user's Python and ours there is torch's C++, and it looks
for signals too: with every operation that autograd records it asks our device guard, in a
``noexcept`` function, through pybind11, whose ``str()`` handles signals (``PyObject_Str``). The
handler sees the user's frame, as if that were all. So it raises nothing itself. It has the frame
traced (``sys.settrace``), and raises when the frame gets to its next instruction: then C++ is done
with the operation, version counters and graph included. (Or its caller, if that instruction already
leaves a ``with`` or ``try``, whose end would be skipped.) A call that waits (``time.sleep``,
``input``) never gets there, but goes on waiting when its signal handler hasn't raised: therefore
the signal is sent again a little later, and if nothing at all has happened since, it is raised.

The handler is put around whatever handles the signal, in the main thread, when an operation finds
another one in place. So handlers that the user, Jupyter or asyncio install, before or after, keep
working; where a signal is ignored, or left to the system, it stays so. Checked on Python 3.11.
"""

from __future__ import annotations

import _signal  # signal.getsignal makes an enum of each answer, which takes ten times as long
import _thread
import contextlib
import dis
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


def atomic_context(function: Any) -> None:
    """Let no interrupt in where a ``contextlib.contextmanager`` function is entered or left; in
    between, in the block, it may come. For those that take away what leaving puts back."""
    code = function.__wrapped__.__code__
    _kinds[code] = _Kind.ATOMIC
    _contexts.add(code)


_contexts: set[types.CodeType] = set()
_ENTERING = {
    getattr(contextlib._GeneratorContextManager, name).__code__
    for name in ("__enter__", "__exit__")
}


def _is_entering(frame: types.FrameType) -> bool:
    """Whether a frame of ``contextlib`` enters or leaves an `atomic_context`."""
    generator = getattr(frame.f_locals.get("self"), "gen", None)
    return getattr(generator, "gi_code", None) in _contexts


def _mark(function: _Function, kind: _Kind) -> _Function:
    _kinds[function.__code__] = kind
    return function


# SIGPROF and SIGVTALRM are left alone: their handlers look at where the program is.
_SIGNALS = [
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
_found: list[Any] = []  # what handled them after the last `install`


def ready() -> bool:
    """Whether the handlers are in place."""
    return [*map(_signal.getsignal, _SIGNALS)] == _found


before_operations: Callable[[], None] | None = None
"""Asked before operations once `forget` was called: it raises if none may run."""


def forget() -> None:
    """Let the next operation call `install`."""
    _found[:] = [None]


def install() -> None:
    """Put the handlers around the present ones. Other threads than the main one can't."""
    if before_operations is not None:
        before_operations()
    if threading.current_thread() is threading.main_thread():
        for signum in _SIGNALS:
            current = _signal.getsignal(signum)
            # SIG_IGN and SIG_DFL are numbers; None is one that C has installed.
            if callable(current) and current.__class__ is not Handler:
                _signal.signal(signum, Handler(current))
        _found[:] = map(_signal.getsignal, _SIGNALS)


class Handler:
    """Handles a signal as the module says, with ``previous`` once it may be raised.

    Each installation has one of its own: if a later handler that calls its predecessor is wrapped
    again, the two don't call each other forever.
    """

    def __init__(self, previous: Callable[[int, types.FrameType | None], Any]) -> None:
        self.previous = previous
        # A time limit for what a hook does is not to wait for the end of the backward pass.
        self.set_inside = _innermost_completed(sys._getframe())

    def __call__(self, signum: int, frame: types.FrameType | None) -> None:
        # C++ may be asking the device guard while an exception is on its way.
        put_error_aside()
        waiting = _waiting.get(signum)
        # None: the user has made Ctrl-C's handler that of another signal. Or the user's handler,
        # which this one has called, calls an earlier one.
        if waiting is None or waiting.raising:
            self.previous(signum, frame)
            return
        again, waiting.sent_again = waiting.sent_again, False
        if again and not waiting.count:
            return  # raised in the meantime
        if not again:
            waiting.count += 1
        waiting.handler = self
        # Only a person's second Ctrl-C means more than the first. An alarm may come every second.
        forced = signum == signal.SIGINT and waiting.count > 1
        outside = _outside(frame, forced, self.set_inside)
        if outside is not frame and forced and waiting.count == 2 and not again:
            os.write(2, _HINT)  # not print: the signal may have come in the middle of one
        if outside is None:  # the interpreter ends
            return
        where = outside, outside.f_lasti
        debugger = sys.gettrace() not in (None, _see_calls)  # it, too, needs the one there is
        if outside is frame and (debugger or (again and where == waiting.where)):
            waiting.raise_(signum, frame)
            return
        waiting.where = where if outside is frame else None
        if not debugger:
            waiting.wait_in(outside)
            sys.settrace(_see_calls)
        _send_again(signum)


class _Waiting:
    """What is known of one signal."""

    count = 0  # those that came since one was raised
    sent_again = False  # the next one that comes is one of those
    thread = False  # a thread is about to send it
    raising = False  # what handled the signal before is at work
    handler: Handler  # which got the last one
    # The frame with whose next instruction it is to be raised.
    frame: types.FrameType | None = None
    # Where that goes on after an exception: the end of the innermost `with` or `try` that it is in.
    guard: int | None = None
    # The frame that the last one came in, and its instruction; None: it has gone on.
    where: tuple[types.FrameType, int] | None = None

    def wait_in(self, frame: types.FrameType) -> None:
        """Let it be raised with this frame's next instruction."""
        self.frame, self.guard = frame, _guard(frame)
        frame.f_trace = _raise_waiting
        frame.f_trace_opcodes = True

    def raise_(self, signum: int, frame: types.FrameType) -> None:
        """Call what handled the signal before."""
        self.count = 0
        self.where = self.frame = None
        if sys.gettrace() is _see_calls and not any(w.count for w in _waiting.values()):
            sys.settrace(None)
        self.raising = True
        try:
            self.handler.previous(signum, frame)
        except BaseException:
            _raised[0] += 1
            raise
        finally:
            self.raising = False


_waiting = {signum: _Waiting() for signum in _SIGNALS}
_raised = [0]


def raised() -> int:
    """How many signals have raised something so far: what fails while the number grows has been
    interrupted, and is not to be tried in another way."""
    return _raised[0]


def _raise_waiting(frame: types.FrameType, event: str, arg: Any) -> None:
    """Traces a frame in which signals are to be raised: its next instruction has come."""
    frame.f_trace = None
    frame.f_trace_opcodes = False
    for signum, waiting in _waiting.items():
        if waiting.frame is frame and waiting.count and _outside(frame, forced=True) is frame:
            caller = _outside(frame.f_back, forced=True)
            # Of `return f()` in a block the next instruction leaves that, and has to.
            if caller is not None and _guard(frame) != waiting.guard != frame.f_lasti:
                waiting.wait_in(caller)
            else:
                waiting.raise_(signum, frame)


def _guard(frame: types.FrameType) -> int | None:
    for entry in dis.Bytecode(frame.f_code).exception_entries:  # type: ignore[attr-defined]
        if entry.start <= frame.f_lasti < entry.end:
            target: int = entry.target
            return target
    return None


def _see_calls(frame: types.FrameType, event: str, arg: Any) -> None:
    """Notes that Python has called something: nobody is just waiting."""
    if frame.f_code.co_filename != __file__:  # the handler
        for waiting in _waiting.values():
            waiting.where = None


def _innermost_completed(frame: types.FrameType | None) -> int | None:
    """The id of the frame of the `completed` function that runs, if one does."""
    while frame is not None and _kinds.get(frame.f_code) is not _Kind.COMPLETED:
        frame = frame.f_back
    return None if frame is None else id(frame)


def _outside(
    frame: types.FrameType | None, forced: bool, set_inside: int | None = None
) -> types.FrameType | None:
    """The innermost frame on the stack in which an interrupt may be raised: ``frame`` itself, or
    one that called a function that must not be left. The frame ``set_inside`` and those that called
    it may be left by what they have called."""
    outside = frame
    is_open = False
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code)
        # An exception in a destructor, or a callback of the garbage collector, gets lost.
        if (
            kind is _Kind.ATOMIC
            or code.co_name == "__del__"
            or code in callbacks
            or (code in _ENTERING and _is_entering(frame))
        ):
            outside, is_open = frame.f_back, False
        elif kind is _Kind.INTERRUPTIBLE or (id(frame) == set_inside and frame is not outside):
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


# As it is: a trace replaces it, to refuse what the step's own code starts
# (compilation/code/threads.py).
_start_new_thread = _thread.start_new_thread


def _send_again(signum: int) -> None:
    if not _waiting[signum].thread:
        _waiting[signum].thread = True
        # Not threading.Thread, whose locks the interrupted code may hold.
        _start_new_thread(_send, (signum,))


def _send(signum: int) -> None:
    time.sleep(_AGAIN_S)
    waiting = _waiting[signum]
    waiting.thread = False
    # Left to the system in the meantime, it would end the process.
    if waiting.count and _signal.getsignal(signum).__class__ is Handler:
        waiting.sent_again = True
        # To the thread, not only noted as by _thread.interrupt_main: it may be waiting by now.
        signal.pthread_kill(threading.main_thread().ident, signum)  # type: ignore[arg-type]


class _Aside(threading.local):
    error: BaseException | None = None


_aside = _Aside()
EXHAUSTED: Iterator[None] = iter(())


def put_error_aside() -> None:
    """Put aside the exception that is pending in this thread, if one is: C++ is asking Python for
    something while an exception is on its way (`integration/operators/backward.py` says when).

    ``next`` of an exhausted iterator with a default returns the default, unless an exception is
    pending already: then it raises that one.
    """
    try:
        next(EXHAUSTED, None)
    except BaseException as error:
        put_aside(error)


def put_aside(error: BaseException) -> None:
    """Let `take_error` give this exception."""
    _aside.error = error


def take_error() -> BaseException | None:
    """The exception that was put aside last, which is forgotten."""
    error, _aside.error = _aside.error, None
    return error
