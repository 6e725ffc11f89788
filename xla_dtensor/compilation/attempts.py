"""As many traces of a step as it takes until one knew what it may change; what it then did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xla_dtensor.compilation.arguments import Arguments
from xla_dtensor.compilation.effects import Effect
from xla_dtensor.compilation.host_random import OWN, MaybeAnotherThread
from xla_dtensor.compilation.installed import Recorder
from xla_dtensor.compilation.lowered import Lowered
from xla_dtensor.compilation.traced import Traced


def trace(
    function: Callable[..., Any],
    arguments: Arguments,
    dynamic: frozenset[int],
    carried: frozenset[str] = frozenset(),
) -> Traced:
    """A trace of a step that knew what it may change: if it comes to code of installed packages for
    the first time, it may not be the first one. One more may be needed for `host_random`."""
    while True:
        recorder = Recorder()
        try:
            try:
                traced = Traced(function, arguments, dynamic, carried, recorder)
            except MaybeAnotherThread:
                token = OWN.set(True)
                try:
                    traced = Traced(function, arguments, dynamic, carried, recorder)
                finally:
                    OWN.reset(token)
        except Exception:
            if not recorder.grown:
                raise
        else:
            if not traced.unforeseen:
                return traced
            traced.undo()


def is_counted_on(effect: Effect, traced: Traced, last: Lowered | None) -> bool:
    """Whether a step changes what it reads itself, as it did when it was traced before."""
    if last is None or not effect.place.guarded or effect.labels() <= traced.names_of_carried:
        return False
    before = {key for earlier in last.effects for key in earlier.changed()}
    return bool(effect.changed() & before)
