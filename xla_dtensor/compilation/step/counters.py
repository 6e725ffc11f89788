"""Counts of traces and compilations over all compiled steps of the process."""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def add(name: str, number: int = 1) -> None:
    """Count ``number`` more of ``name``: "compilations", "traces" or "recompilations"."""
    with _lock:
        _counts[name] += number


def total(name: str) -> int:
    """How many of ``name`` have been counted."""
    return _counts[name]
