"""Counts of the whole process: how often steps were compiled, and how long what took."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_seconds: defaultdict[str, float] = defaultdict(float)


def add(name: str, number: int = 1) -> None:
    """Count ``number`` more of ``name``: "compilations", "traces", "recompilations" or "steps"."""
    with _lock:
        _counts[name] += number


def total(name: str) -> int:
    """How many of ``name`` have been counted."""
    return _counts[name]


class _Own(threading.local):
    """This thread's: which blocks it is in, and how long it has been in which."""

    names: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)


_own = _Own()


@contextlib.contextmanager
def timing(name: str) -> Iterator[None]:
    """Add the block's seconds to those of ``name``. Of nested blocks the outermost counts."""
    names = _own.names
    if name in names:
        yield
        return
    _own.names, begin = names | {name}, time.monotonic()
    try:
        yield
    finally:
        _own.names, taken = names, time.monotonic() - begin
        _own.seconds[name] += taken
        with _lock:
            _seconds[name] += taken


def seconds(name: str) -> float:
    """How long the blocks of ``name`` have taken, of all threads."""
    return _seconds.get(name, 0.0)


def own_seconds(*names: str) -> float:
    """How long this thread has been in the blocks of ``names``."""
    return sum(_own.seconds.get(name, 0.0) for name in names)
