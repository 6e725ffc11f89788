"""Whether a training run has to stop: it has got a signal, or a deadline comes near."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Progress:
    """What the run of this process has come to, for `xla_dtensor.elastic`, which goes on with it.

    Attributes:
        step: how many steps have been done; None if nobody has said so.
        stopped_by: why it has stopped before its end, with a checkpoint; None if it hasn't.
    """

    step: int | None = None
    stopped_by: str | None = None


progress = Progress()


class Stopping:
    """Waits for signals and for a point in time.

    Args:
        signals: such as ``signal.SIGTERM``. The first one is noted here and nothing else; a second
            one does what it did before. Only the main thread can wait for them.
        deadline: seconds from now, or a point in time.

    Attributes:
        reason: why to stop; None as long as there is no reason to.
    """

    def __init__(self, signals: Sequence[int], deadline: float | datetime.datetime | None) -> None:
        self.reason: str | None = None
        self._before: dict[int, Any] = {}
        self._deadline: float | None = None
        if isinstance(deadline, datetime.datetime):
            left = deadline - datetime.datetime.now(deadline.tzinfo)
            self._deadline = time.monotonic() + left.total_seconds()
        elif deadline is not None:
            self._deadline = time.monotonic() + deadline
        if threading.current_thread() is threading.main_thread():
            for signum in signals:
                self._before[signum] = signal.signal(signum, self._handle)

    def comes_within(self, seconds: float) -> bool:
        """Whether the deadline is less than ``seconds`` away."""
        return self._deadline is not None and time.monotonic() + seconds >= self._deadline

    def close(self) -> None:
        """Let signals do what they did before."""
        for signum, before in self._before.items():
            current: Any = signal.getsignal(signum)
            # Handlers of our own, or the user's, may have been put around it.
            while current is not None and current != self._handle:
                current = getattr(current, "previous", None)
            if current is not None:
                signal.signal(signum, before if before is not None else signal.SIG_DFL)
        self._before = {}

    def _handle(self, signum: int, frame: Any) -> None:
        if self.reason is None:
            self.reason = signal.Signals(signum).name
            return
        before = self._before.get(signum, signal.SIG_DFL)
        if callable(before):
            before(signum, frame)
        elif before == signal.SIG_DFL:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
