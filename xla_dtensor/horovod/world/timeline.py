"""Horovod's timeline: when each collective was asked for, agreed on and waited for.

It is a JSON file that ``chrome://tracing`` and Perfetto show. What the devices do is in
``jax.profiler``'s own traces.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from typing import Any

from xla_dtensor.horovod.collectives.collective import Request


class Timeline:
    """The events since `start`, of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: str | None = None
        self._events: list[dict[str, Any]] = []
        self._rows: dict[str, int] = {}
        self._mark_cycles = False

    @property
    def is_on(self) -> bool:
        """Whether events are written down."""
        return self._path is not None

    def start(self, path: str, mark_cycles: bool) -> None:
        """Write events down from now on."""
        with self._lock:
            self._path, self._mark_cycles = path, mark_cycles
            self._events, self._rows = [], {}

    def stop(self) -> None:
        """Write the file."""
        with self._lock:
            path, self._path = self._path, None
            if path is not None:
                with open(path, "w") as file:
                    json.dump(self._events, file)

    def begin(self, request: Request) -> None:
        """A rank asks for a collective: the others are waited for."""
        self._add(request, "B", f"NEGOTIATE_{request.collective.kind.upper()}")

    def launch(self, requests: list[Request]) -> None:
        """All have asked, and the devices have it: one cycle."""
        if self.is_on and self._mark_cycles:
            with self._lock:
                self._put({"name": "CYCLE_START", "ph": "i", "s": "g", "tid": 0})
        for request in requests:
            self._add(request, "E", f"NEGOTIATE_{request.collective.kind.upper()}")
            self._add(request, "B", request.collective.kind.upper())

    def end(self, request: Request) -> None:
        """Somebody has waited for the result."""
        self._add(request, "E", request.collective.kind.upper())

    def _add(self, request: Request, phase: str, name: str) -> None:
        if not self.is_on:
            return
        with self._lock:
            row = self._rows.get(request.name)
            if row is None:
                row = self._rows[request.name] = len(self._rows) + 1
                names = {"name": request.name}
                self._put({"name": "thread_name", "ph": "M", "tid": row, "args": names})
            self._put({"name": name, "ph": phase, "tid": row})

    def _put(self, event: dict[str, Any]) -> None:
        self._events.append({"pid": os.getpid(), "ts": time.perf_counter_ns() / 1000, **event})


timeline = Timeline()
atexit.register(timeline.stop)

VARIABLE = "HOROVOD_TIMELINE"
"""The file that `init` begins to write, on rank 0."""


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write down when collectives are asked for and done. ``HOROVOD_TIMELINE`` does it from `init`
    on; of several processes, rank 0 writes.

    Args:
        file_path: the file, in the format of ``chrome://tracing``, written by `stop_timeline` or
            `shutdown`.
        mark_cycles: whether launches are marked, too, with CYCLE_START.

    Raises:
        ValueError: a timeline is being written.

    Example::

        import pathlib, tempfile, torch, xla_dtensor.horovod as hvd

        hvd.init()
        path = tempfile.mktemp(".json")
        hvd.start_timeline(path)
        hvd.allreduce(torch.ones(3, device="xla"), name="ones")
        hvd.stop_timeline()
        assert "NEGOTIATE_ALLREDUCE" in pathlib.Path(path).read_text()
    """
    if timeline.is_on:
        raise ValueError("start_timeline: one is being written; call stop_timeline() before")
    timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Write the file of `start_timeline`.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        hvd.stop_timeline()  # nothing was begun
        assert hvd.is_initialized()
    """
    timeline.stop()
