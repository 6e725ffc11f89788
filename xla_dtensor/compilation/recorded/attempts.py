"""Traces a step, again where the trace found code or state that the walk had missed."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from xla_dtensor.base import executor, interrupts
from xla_dtensor.base.torch_private.attributes import is_leaf
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.code.host_random import OWN, MaybeAnotherThread
from xla_dtensor.compilation.code.installed import CodeRecorder, functions_of
from xla_dtensor.compilation.recorded.start import Start
from xla_dtensor.compilation.recorded.traced import Traced
from xla_dtensor.compilation.trace import first_calls
from xla_dtensor.compilation.trace.numbers_of_trace import NumberLeft
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.dispatch.positions import Positions
from xla_dtensor.errors import DataDependentError, MeshMismatchError
from xla_dtensor.execution import lazy
from xla_dtensor.tensors.base import grad_of

_MOST_MADE_BEFORE = 16  # more are new ones in each trace


class Attempt:
    """Something that may be tried again in another way, if it is its own fault that it fails."""

    def __init__(self) -> None:
        self._raised = interrupts.raised()

    def is_final(self, error: Exception) -> bool:
        """Whether ``error`` has come from outside: a signal's handler, a connection, a file."""
        return interrupts.raised() != self._raised or isinstance(error, OSError | MemoryError)


def trace(
    function: Callable[..., Any],
    arguments: Arguments,
    dynamic: frozenset[int],
    carried: frozenset[str],
    positions: bool = True,
    known: Watch | None = None,
    items: frozenset[str] | None = frozenset(),
) -> tuple[Traced, Exception | None]:
    """A trace of a step in which the numbers ``dynamic`` are inputs, or constants if the step's
    Python can't do with that; then also why.

    Args:
        known: what is known of what it can read.
        positions: whether what they index by may be an input, too. Where the step can't do with
            that alone (it returns ``x[n]``, which is a view), it is part of the program.
        items: the items of tensors that are inputs, beside floats; None: none is.
    """
    at = Positions() if positions else None
    ways: list[tuple[frozenset[int], Positions | None]] = [(dynamic, at)]
    if at is not None:
        ways.append((dynamic, None))
    leaves = dynamic - arguments.fields
    if leaves != dynamic and leaves:
        ways.append((leaves, None))
    if dynamic:
        ways.append((frozenset(), None))
    attempt = Attempt()
    failed: Exception | None = None
    while True:
        numbers, used = ways.pop(0)
        try:
            traced = _trace(function, arguments, numbers, carried, used, known, items)
            return traced, None if numbers == dynamic else failed
        except Exception as error:
            if used is not None and not used.used:
                del ways[0]  # it would trace the same again
            if not ways or attempt.is_final(error):
                raise  # no other way is left: the step itself raises
            failed = error


def _trace(
    function: Callable[..., Any],
    arguments: Arguments,
    dynamic: frozenset[int],
    carried: frozenset[str],
    positions: Positions | None = None,
    known: Watch | None = None,
    items: frozenset[str] | None = frozenset(),
) -> Traced:
    """A trace of a step that knew what it may change: if it comes to code of installed packages, or
    to code that torch calls, for the first time, it may not be the first one. One more may be
    needed for `host_random`, one where the step's Python can't do with hyperparameters or items
    that are inputs, and one where it doesn't compute on the mesh of what it could reach."""
    fixed, knows_frame, made_before = False, True, 0
    unmet: list[FunctionType] = []

    def attempt_with(recorder: CodeRecorder) -> Traced:
        nonlocal known
        while True:
            about = (function, arguments, dynamic, carried, recorder, fixed, unmet, known)
            start = Start(*about, knows_frame=knows_frame, items=items)
            known = start.watch  # a further attempt's walk begins with its names
            grads = map(grad_of, filter(is_leaf, start.leaves))
            if not first_calls.claim(first_calls.memory_of((*start.leaves, *grads))):
                return Traced(start, positions)

    while True:
        recorder = CodeRecorder()
        attempt = Attempt()
        try:
            try:
                traced = attempt_with(recorder)
            except MaybeAnotherThread:
                token = OWN.set(True)
                try:
                    traced = attempt_with(recorder)
                finally:
                    OWN.reset(token)
        except executor.MadeBefore as before:
            made_before += 1
            if made_before > _MOST_MADE_BEFORE:
                raise DataDependentError(
                    "the step makes what has to be there before it is traced (a "
                    "torch.amp.GradScaler, whose scale is an input of the program); make it "
                    "outside of the compiled function"
                ) from None
            before.make()
            lazy.flush_all()
        except Exception as error:
            if attempt.is_final(error):
                raise
            if knows_frame and isinstance(error, MeshMismatchError):
                knows_frame = False
                continue
            if items:  # torch's C++ may want the number itself
                items = frozenset()
                continue
            if isinstance(error, NumberLeft) and not dynamic and items is not None:
                items = None
                continue
            # Where nobody can tell what has run (a profiler's trace), another one is the same.
            if not recorder.grown or recorder.executed() is None:
                if fixed or not recorder.feeds or isinstance(error, DataDependentError):
                    raise
                fixed, known = True, None
        else:
            met = [f for f in functions_of(recorder.unmet) if f not in unmet]
            if not (traced.unforeseen or met or traced.is_misplaced):
                return traced
            traced.undo()
            knows_frame = knows_frame and not traced.is_misplaced
            unmet += met
            known = traced.unforeseen or known
