"""`Counts`: a tensor of counts that Python has asked for, and what is known of their sums."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from xla_dtensor.base import recomputation

Terms = frozenset[tuple[tuple["Counts", int], int]]
"""A sum: how often each entry is in it."""


class Counts:
    """A tensor of counts that Python has asked for, and what is known of them.

    Attributes:
        tensor: int64, flat, as it was then; nobody else writes to it.
        exact: what sums of its entries are. Each sum has its own key, `CountNode.terms`.
        most: what they are at most.
        equal: sums of other entries that are the same.
        matched: lists of sizes of which it has been checked that one is what the others send.
        lengths: sums that have been checked not to be negative.
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        _state.last.next = link = _Link(self)
        _state.last = link
        self.exact: dict[Terms, int] = {}
        self.most: dict[Terms, int] = {}
        self.equal: dict[Terms, Any] = {}
        self.matched: set[Any] = set()
        self.lengths: set[Any] = set()


class _Link:
    """Counts, and those that were asked for after them."""

    def __init__(self, counts: Counts | None) -> None:
        self.counts = None if counts is None else weakref.ref(counts)
        self.next: _Link | None = None


class _State(threading.local):
    def __init__(self) -> None:
        self.last = _Link(None)
        self.again: _Link | None = None


_state = _State()


def asked_before(size: int) -> Counts | None:
    """Those that a block which ``torch.utils.checkpoint`` computes again asks for again: torch
    compares sizes, and gradients of the first come to what is computed again."""
    if _state.again is None or _state.again.next is None:
        return None
    _state.again = _state.again.next
    found = None if _state.again.counts is None else _state.again.counts()
    return found if found is not None and len(found.tensor) == size else None


@contextmanager
def _restored(link: _Link) -> Iterator[None]:
    before, _state.again = _state.again, link
    try:
        yield
    finally:
        _state.again = before


recomputation.watch(lambda: _state.last, _restored)
