"""A step's program looked at without being run, and calls of steps where there is no data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from xla_dtensor.base.thread_state import tracing
from xla_dtensor.compilation.arguments import Arguments, ReadsMore
from xla_dtensor.compilation.attempts import trace
from xla_dtensor.compilation.program import Program
from xla_dtensor.errors import DataDependentError
from xla_dtensor.execution import lazy


def looked_at(step: Any, args: Any, kwargs: Any, look: Callable[[Program], Any]) -> Any:
    """What ``look`` sees of a step's program for these arguments, which is lowered and not
    compiled; nothing runs, changes or is counted. State that the step's optimizer makes is there
    while it looks.

    Args:
        step: a `CompiledStep`.
        args, kwargs: as of a call.
        look: is given the `Program`.
    """
    lazy.flush_all()
    arguments = Arguments(args, kwargs, step._reads)
    with step._lock, tracing, step._checks:
        try:
            traced, _ = trace(step._function, arguments, arguments.lengths, step._carried)
        except ReadsMore as more:
            arguments = Arguments(args, kwargs, more.reads)
            traced, _ = trace(step._function, arguments, arguments.lengths, step._carried)
        try:
            return look(Program(traced, traced.take_call(), None, step._options))
        finally:
            traced.undo()


_elsewhere: list[Callable[..., Any]] = []


@contextlib.contextmanager
def calls_go_to(call: Callable[..., Any]) -> Iterator[None]:
    """Calls of compiled steps where tensors have no data (``xd.abstract``) are those of
    ``call(step, args, kwargs)``, for a block."""
    _elsewhere.append(call)
    try:
        yield
    finally:
        _elsewhere.pop()


def called_without_data(step: Any, args: Any, kwargs: Any) -> Any:
    """What a call of a step is where tensors have no data.

    Raises:
        DataDependentError: nobody has said what it is.
    """
    if _elsewhere:
        return _elsewhere[-1](step, args, kwargs)
    raise DataDependentError(
        f"{step._name()} was called inside of xd.abstract(), where tensors have layouts and no "
        "data to compute with: xd.plan(step, *args) says what it needs"
    )
