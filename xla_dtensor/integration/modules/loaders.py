"""``DataLoader`` workers: starts them without JAX's warning that a fork may deadlock.

A worker is a fork, of which JAX warns that it will likely deadlock. It doesn't where the worker
leaves xla tensors alone, and where it doesn't ours raise (`forked`).
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from xla_dtensor.base.torch_private import MultiProcessingIterator


def install() -> None:
    """Start workers without the warning."""
    iterator: Any = MultiProcessingIterator
    init = iterator.__init__

    @functools.wraps(init)
    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            init(self, *args, **kwargs)

    iterator.__init__ = started
