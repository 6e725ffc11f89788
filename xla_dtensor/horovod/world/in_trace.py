"""Whether the caller is in the trace of a compiled step, and still in the same one as before."""

from __future__ import annotations

import weakref

from xla_dtensor.base import executor


class TraceScope:
    """The trace in which it is made, or eager code.

    Values of a trace must not be used after it, also where it has failed. Who keeps something from
    one call to the next asks `is_here` before using it.
    """

    def __init__(self) -> None:
        trace = executor.trace()
        self._trace = None if trace is None else weakref.ref(trace)

    @property
    def is_traced(self) -> bool:
        """Whether it was made in a trace."""
        return self._trace is not None

    def is_here(self) -> bool:
        """Whether the caller is in the same trace, or in eager code as it was."""
        return executor.trace() is (None if self._trace is None else self._trace())
