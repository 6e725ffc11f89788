"""Metrics: what this package counts, by torch_xla's calls.

``CompileTime`` and ``ExecuteTime`` aren't measured; ``xla_dtensor.compat.torch_xla.debug.profiler``
has times. Counted are the programs of all compiled steps of the process, those that are gone as
well, and the hits and misses of the caches that there are (`xla_dtensor.debug.caches`), of which
those of "plans" are the kinds of operations.
"""

from __future__ import annotations

from typing import Any

from xla_dtensor.base.tables import cache
from xla_dtensor.base.tables.counters import total
from xla_dtensor.runtime import live_programs


class _Since:
    """What the counters were when they were cleared."""

    counts: dict[str, int]

    def __init__(self) -> None:
        self.counts = {}


_since = _Since()


def _all() -> dict[str, int]:
    found = {
        "UncachedCompile": total("compilations"),
        "Traces": total("traces"),
        "Recompilations": total("recompilations"),
        "LivePrograms": live_programs()[0],
    }
    for record in cache.caches():
        if record.hits is not None:
            found[f"{record.name}.hits"] = record.hits
            found[f"{record.name}.misses"] = record.misses or 0
    return found


def _counts() -> dict[str, int]:
    found = {name: count - _since.counts.get(name, 0) for name, count in _all().items()}
    return {name: count for name, count in found.items() if count > 0}  # a cache may be gone


def counter_names() -> list[str]:
    """The names of the counters that aren't 0."""
    return sorted(_counts())


def counter_value(name: str) -> int | None:
    """What a counter has counted since `clear_all`; None if that is nothing, or no counter.

    Example::

        import torch
        import xla_dtensor.compat.torch_xla as torch_xla
        import xla_dtensor.compat.torch_xla.debug.metrics as met

        met.clear_all()
        step = torch_xla.compile(lambda x: x + 1)
        step(torch.ones(3, device="xla"))
        step(torch.ones(3, device="xla"))
        assert met.counter_value("UncachedCompile") == 1
    """
    return _counts().get(name)


def metric_names() -> list[str]:
    """The names of what is measured: nothing."""
    return []


def metric_data(name: str) -> tuple[Any, ...] | None:
    """A measurement: None, as torch_xla has it of a name that hasn't been measured."""
    return None


def clear_counters() -> None:
    """Let all counters start again."""
    _since.counts = _all()


clear_all = clear_counters


def clear_metrics() -> None:
    """Nothing: nothing is measured."""


def metrics_report() -> str:
    """The counters, as text."""
    return "".join(f"Counter: {name}\n  Value: {count}\n" for name, count in _counts().items())


def short_metrics_report(
    counter_names: list[str] | None = None, metric_names: list[str] | None = None
) -> str:
    """Some of the counters, as text; all by default."""
    wanted = _counts() if counter_names is None else counter_names
    return "".join(
        f"Counter: {name}\n  Value: {count}\n"
        for name, count in _counts().items()
        if name in wanted
    )
