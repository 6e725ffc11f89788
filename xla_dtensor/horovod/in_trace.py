"""Whether the caller is in the trace of a compiled step, and still in the same one as before."""

from __future__ import annotations

import weakref

from xla_dtensor.base import executor


class TraceScope:
    """The place in which it is made. What began in a trace is of no use outside of it, also if the
    trace has failed."""

    def __init__(self) -> None:
        trace = executor.trace()
        self._trace = None if trace is None else weakref.ref(trace)

    @property
    def is_traced(self) -> bool:
        """Whether it was a trace."""
        return self._trace is not None

    def is_here(self) -> bool:
        """Whether the caller is in the same one."""
        return executor.trace() is (None if self._trace is None else self._trace())
