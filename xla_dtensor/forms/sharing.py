"""The lock that keeps a thread from reading an array that a compiled step is donating.

A step gives the memory of what it overwrites to XLA, which refuses such an array afterwards, or
ends the process. So a thread holds `lock` from the look at a storage to the launch that reads its
array, or takes it over. Copying an array to the host takes too long for that: who does so says it
(`looking_at`), and steps take over a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from xla_dtensor.runtime import processes

# One lock for all batches: with one for each, two threads that each read what the other's batch
# has pending would deadlock.
lock = threading.RLock()

_looked_at: list[Any] = []


def launching() -> AbstractContextManager[Any]:
    """A block that reads storages' arrays and launches what computes with them."""
    # None in several processes: a launch may wait for other processes, and those for another
    # thread of this one.
    return nullcontext() if processes.several() else lock


@contextmanager
def looking_at(array: Any) -> Iterator[None]:
    """A block in which no step takes ``array`` over. Begin it in a `launching` one."""
    _looked_at.append(array)
    try:
        yield
    finally:
        with lock:
            index = next(i for i, other in enumerate(_looked_at) if other is array)
            del _looked_at[index]


def looked_at() -> frozenset[int]:
    """The ids of the arrays that threads copy to the host."""
    return frozenset(map(id, _looked_at))
