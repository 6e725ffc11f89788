"""Makes operations raise in a forked child of a process in which XLA runs.

XLA's threads are not in the child, and whatever asks its devices there waits for ever.
"""

from __future__ import annotations

import functools
import os

from xla_dtensor.base import interrupts

_is_child = False


@functools.cache
def watch() -> None:
    """Notice forks from now on; called when XLA starts."""
    os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    global _is_child
    _is_child = True
    interrupts.before_operations = refuse
    interrupts.forget()


def is_child() -> bool:
    """Whether this process was forked from one in which XLA ran."""
    return _is_child


def refuse() -> None:
    """Raise because of where we are.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "Cannot use xla tensors in a forked subprocess: XLA's threads stayed behind. Let the "
        "workers of a DataLoader work on CPU tensors and move batches in the main process, or "
        "start them anew (multiprocessing_context='spawn')"
    )
