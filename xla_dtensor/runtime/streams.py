"""``torch.xla.Stream`` and ``Event``.

XLA orders what it runs by the data: no operation sees a tensor before it is there. So there is one
order and nothing to wait for, and all streams are one. An event tells time: with
``enable_timing=True``, recording it waits until the devices have done what was asked of them.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from xla_dtensor.base import executor
from xla_dtensor.runtime import memory
from xla_dtensor.runtime.idle import is_idle


class Event(torch.Event):
    """A moment: everything that was asked of the devices before it.

    Args:
        enable_timing: whether `elapsed_time` may be asked for; then `record` waits.
        blocking, interprocess, external: as torch has them; nothing depends on them.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Event:
        return super().__new__(cls, device="xla:0")

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self.enable_timing = enable_timing
        self._recorded = False
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        """Make this moment the event's."""
        executor.current().refuse("when an event is recorded, which")
        if self.enable_timing:
            memory.synchronize()
            self._time = time.perf_counter()
        self._recorded = True

    def wait(self, stream: Any = None) -> None:
        """Nothing: what comes later finds its data when it is there."""

    def query(self) -> bool:
        """Whether the devices have done what was asked of them before it."""
        return not self._recorded or self._time is not None or is_idle()

    def synchronize(self) -> None:
        """Wait until they have."""
        if self._recorded and self._time is None:
            memory.synchronize()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to another.

        Raises:
            RuntimeError: one of them was not recorded, or made without ``enable_timing=True``.
        """
        for event in (self, end_event):
            if not event.enable_timing:
                raise RuntimeError(
                    "Both events must be created with argument 'enable_timing=True'."
                )
            if event._time is None:
                raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        assert self._time is not None and end_event._time is not None
        return (end_event._time - self._time) * 1000

    def __repr__(self) -> str:
        return f"torch.xla.Event(enable_timing={self.enable_timing}, recorded={self._recorded})"


class Stream(torch.Stream):
    """The order in which the devices work. There is one; each stream is it.

    Args:
        device: ``"xla"``.
        priority: as torch has it; nothing depends on it.
    """

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        return super().__new__(cls, device="xla:0")

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        pass

    @classmethod
    def default(cls) -> Stream:
        """The stream that is current when no other was made so."""
        return cls()

    def synchronize(self) -> None:
        """Wait until the devices have done what was asked of them."""
        memory.synchronize()

    def query(self) -> bool:
        """Whether they have."""
        return is_idle()

    def wait_stream(self, stream: Any) -> None:
        """Nothing: what comes later finds its data when it is there."""

    def wait_event(self, event: Any) -> None:
        """Nothing, for the same reason."""

    def record_event(self, event: Any = None) -> Any:
        """Record an event, a new one if none is given, and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        context = StreamContext(self)
        _current.contexts.append(context)
        context.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        _current.contexts.pop().__exit__(*exc_info)

    def __repr__(self) -> str:
        return "torch.xla.Stream()"


class _Current(threading.local):
    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.contexts: list[StreamContext] = []


_current = _Current()


def current_stream() -> Stream:
    """The stream that was made the current one in this thread, or the default one."""
    return _current.stream or Stream.default()


def set_stream(stream: Stream | None) -> None:
    """Make a stream the current one of this thread; None changes nothing."""
    if stream is not None:
        _current.stream = stream


class StreamContext:
    """``with torch.xla.stream(s):`` makes a stream the current one, until the block ends.

    Args:
        stream: the stream; None changes nothing.
    """

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: Stream | None = None

    def __enter__(self) -> Stream | None:
        self._before = _current.stream
        set_stream(self.stream)
        return self.stream

    def __exit__(self, *exc_info: object) -> None:
        _current.stream = self._before
