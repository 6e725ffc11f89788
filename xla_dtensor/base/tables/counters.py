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
    """Count ``number`` more of ``name``: "compilations", "traces" or "recompilations"."""
    with _lock:
        _counts[name] += number


def total(name: str) -> int:
    """How many of ``name`` have been counted."""
    return _counts[name]


class _Inside(threading.local):
    names: frozenset[str] = frozenset()


_inside = _Inside()


@contextlib.contextmanager
def timing(name: str) -> Iterator[None]:
    """Add the block's seconds to those of ``name``. Of nested blocks the outermost counts."""
    names = _inside.names
    if name in names:
        yield
        return
    _inside.names, begin = names | {name}, time.monotonic()
    try:
        yield
    finally:
        _inside.names = names
        with _lock:
            _seconds[name] += time.monotonic() - begin


def seconds(name: str) -> float:
    """How long the blocks of ``name`` have taken."""
    return _seconds.get(name, 0.0)
