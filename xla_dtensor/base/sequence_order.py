"""Whether ``context_parallel`` has permuted sequence positions, and so causal masks, too.

torch's ``context_parallel`` deals them out so that causal attention costs each device the same. Who
hooks into it says so here; compiled steps ask whether it is still so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable


def _as_numbered() -> Hashable:
    return None


current: Callable[[], Hashable] = _as_numbered
"""The order of this moment, as a value to compare; None for that of the numbers."""


def bind(order: Callable[[], Hashable]) -> None:
    """Ask ``order`` from now on."""
    global current
    current = order
