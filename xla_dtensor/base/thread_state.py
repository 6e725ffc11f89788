"""State of a thread: which `DFunction` or optimizer formula it runs, its trace's random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

tracing = threading.RLock()
"""Held while a step is traced: hooks, and torch's flag that it compiles, are the process's. So
there is one trace at a time, and who computes by that flag waits."""


class RandomNumbers:
    """The random operations of a step that is being traced.

    Attributes:
        seed, start: the generator's state when the trace began.
        counter: its present count of operations.
        latest: the highest that the count has been: a recomputation goes back, and forth again.
        refuse: raises because of what is described.
    """

    __slots__ = ("counter", "latest", "refuse", "seed", "start")

    def __init__(self, seed: int, start: int, refuse: Callable[[str], None]) -> None:
        self.seed, self.start, self.refuse = seed, start, refuse
        self.counter = self.latest = start

    def advance(self, operations: int = 1) -> None:
        """Count ``operations`` random operations."""
        self.counter += operations
        self.latest = max(self.latest, self.counter)


class _ThreadState(threading.local):
    function: str | None = None
    formula: bool = False
    in_blocks: bool = False
    swapping: bool = False


_state = _ThreadState()


class _During:
    """A block in which something of this thread's state has another value."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value

    def __enter__(self) -> None:
        self._outer = getattr(_state, self._name)
        setattr(_state, self._name, self._value)

    def __exit__(self, *exc_info: object) -> None:
        setattr(_state, self._name, self._outer)


def inside_function(name: str | None) -> _During:
    """Let the thread know, for a block, that it is in the forward or backward called ``name`` of a
    `DFunction` (None: in none, as far as the block's code can tell)."""
    return _During("function", name)


def function() -> str | None:
    """The forward or backward of a `DFunction` that this thread is in."""
    return _state.function


def in_formula() -> _During:
    """Let the thread know, for a block, that it is in the formula of one of torch's optimizers,
    which does nothing with a tensor's value in Python but compute with it."""
    return _During("formula", True)


def is_in_formula() -> bool:
    """Whether this thread is in the formula of one of torch's optimizers."""
    return _state.formula


def in_blocks(wanted: bool) -> _During:
    """Let the thread know, for a block, whether it traces a step that is to have the same bits on
    any mesh, so that operations have to be the same in any layout."""
    return _During("in_blocks", wanted)


def is_in_blocks() -> bool:
    """Whether this thread traces such a step."""
    return _state.in_blocks


def swapping_tensors() -> _During:
    """A block in which torch swaps all that two tensors are (``torch.utils.swap_tensors``)."""
    return _During("swapping", True)


def swaps_tensors() -> bool:
    """Whether it does."""
    return _state.swapping
