"""Where processes are: a line of each, sent with its heartbeats, and on SIGUSR1 all stacks.

A process that waits for another one to come to the same point can so tell a slow one from one that
waits for it in turn: it reads what all processes have to compute.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from xla_dtensor.base.source_line import is_users
from xla_dtensor.base.tables import counters
from xla_dtensor.runtime import processes


@dataclass(frozen=True)
class Whereabouts:
    """Where a process is.

    Attributes:
        reads_for: for how many seconds it has waited for a value that all compute; 0 if it doesn't.
        line: the user's line that it executes.
        steps: how many compiled steps it has launched.
    """

    reads_for: float
    line: str
    steps: int = 0

    def text(self) -> str:
        """As a text for the key-value store."""
        return json.dumps([round(self.reads_for, 1), self.line, self.steps])

    def __str__(self) -> str:
        steps = f" (compiled step {self.steps})" if self.steps else ""
        return f"{self.line}{steps}" if self.line else steps.strip(" ()")


class _Reading:
    """Which thread waits for a value that all compute, and since when."""

    thread: int | None = None
    since = 0.0


_reading = _Reading()


@contextmanager
def reading() -> Iterator[None]:
    """For the time of a block, this thread waits for a value that all processes compute."""
    _reading.since, _reading.thread = time.monotonic(), threading.get_ident()
    try:
        yield
    finally:
        _reading.thread = None


def read(text: str) -> Whereabouts:
    """What `Whereabouts.text` has written."""
    return Whereabouts(*json.loads(text))


def here() -> Whereabouts:
    """Where this process is now; asked from a thread that looks on."""
    thread, since = _reading.thread, _reading.since
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    line = ""
    if frame is not None:
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        line = f"at {frame.f_code.co_filename}:{frame.f_lineno}: {text}"
    reads_for = 0.0 if thread is None else time.monotonic() - since
    return Whereabouts(reads_for, line, counters.total("steps"))


class StacksOnRequest:
    """When one of several processes gets SIGUSR1, the stacks of all threads of all processes go to
    one file: where a program hangs, and who hangs elsewhere.

    A process that waits in a collective runs no handler of Python's. So faulthandler's, which is
    C, notes the signal, and the thread that gives signs of life looks.

    Args:
        patience: for how many seconds the others are waited for.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._answered = ""
        self._asked_at: float | None = None
        self._signals = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        self._size = 0
        # A handler of the user's, or of a scheduler's library, stays; one that comes later wins.
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            faulthandler.register(signal.SIGUSR1, self._signals, all_threads=False)

    def look(self) -> None:
        """Ask, answer, or write the file, if it is time to."""
        store, me = processes.store(), processes.index()
        size = os.fstat(self._signals.fileno()).st_size
        if size != self._size and self._asked_at is None:
            self._asked_at = time.monotonic()
            store.put("stacks/asked", f"{me} {size}", again=True)
        self._size = size
        asked = store.look("stacks/asked")
        if asked is not None and asked != self._answered:
            self._answered = asked
            store.put(f"stacks/of/{me}", f"{asked}\n{stacks()}", again=True)
        if self._asked_at is not None:
            answers = {
                int(index): text.partition("\n")[2]
                for index, text in store.all_of("stacks/of").items()
                if text.partition("\n")[0] == asked
            }
            late = time.monotonic() - self._asked_at > self._patience
            if late or len(answers) == processes.count():
                self._asked_at = None
                self._write(answers)

    def _write(self, answers: dict[int, str]) -> None:
        parts = [
            f"{processes.known(i)}\n{answers.get(i, f'no answer in {self._patience:g} s')}"
            for i in range(processes.count())
        ]
        name = f"xla_dtensor_stacks_{time.strftime('%Y%m%d_%H%M%S')}.txt"
        folder = Path.cwd() if os.access(Path.cwd(), os.W_OK) else Path(tempfile.gettempdir())
        (folder / name).write_text("\n\n".join(parts) + "\n")
        os.write(2, f"xla_dtensor: the stacks of all processes are in {folder / name}\n".encode())


def stacks() -> str:
    """The stacks of this process's threads, the main one first, each with its newest line last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
    )
