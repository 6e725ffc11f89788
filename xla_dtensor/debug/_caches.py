"""`caches`: what the library keeps from one call to the next, and how much of it."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator

from xla_dtensor.base.tables import cache
from xla_dtensor.base.tables.cache import CacheRecord
from xla_dtensor.runtime import live_programs

_HEAD = ("cache", "entries", "limit", "code", "hits", "misses", "note")


class CacheTable:
    """Caches by name, as they were when the table was made; printed as a table.

    Each is a record with ``name``, ``entries``, ``limit`` (None: no limit, and ``note`` says why),
    ``bytes``, ``hits`` and ``misses`` (None where nobody counts them).

    Attributes:
        programs: how many XLA programs the process has, whoever made them.
        program_bytes: their code in bytes; None where the backend doesn't say.

    Example::

        import torch, xla_dtensor as xd

        xd.debug.clear_caches()
        (torch.ones(3, device="xla") * 2).tolist()
        table = xd.debug.caches()
        assert table["plans"].entries > 0 and table.programs > 0
        table.clear("plans")
        assert xd.debug.caches()["plans"].entries == 0
    """

    def __init__(self, records: list[CacheRecord]) -> None:
        self._records = records
        self.programs, self.program_bytes = live_programs()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[CacheRecord]:
        return iter(self._records)

    def __getitem__(self, name: str) -> CacheRecord:
        for record in self._records:
            if record.name == name:
                return record
        raise KeyError(name)

    def clear(self, name: str | None = None) -> None:
        """Empty caches; see `clear_caches`. The table stays what it is.

        Args:
            name: of one cache; all by default.

        Raises:
            ValueError: no cache is called so.
        """
        clear_caches(name)

    def __str__(self) -> str:
        rows = [_HEAD, *map(_row, self._records)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD) - 1)]
        lines = []
        for name, *numbers, note in rows:
            aligned = map(str.rjust, numbers, widths[1:])
            lines.append("  ".join([name.ljust(widths[0]), *aligned, note]).rstrip())
        code = "" if self.program_bytes is None else f", {_size(self.program_bytes)} of code"
        return "\n".join([*lines, f"XLA programs in this process: {self.programs}{code}"])

    __repr__ = __str__


def caches() -> CacheTable:
    """What the library keeps from one call to the next: of each cache its name, how many entries it
    has and keeps at most, how large they are where that is known, and how often something was
    found in it.

    Returns:
        a `CacheTable`: iterable, by name (``caches()["plans"]``), and printed as a table.

    Example::

        import xla_dtensor as xd

        assert "plans" in [record.name for record in xd.debug.caches()]
        assert xd.debug.caches()["plans"].limit == 2048
    """
    return CacheTable(cache.caches())


def clear_caches(name: str | None = None) -> None:
    """Forget what can be made again: plans and compiled programs above all. Tensors stay what they
    are; the next calls compile anew (or find their programs in JAX's persistent cache). Without a
    name, memory that is free then goes back to the system (on Linux).

    Args:
        name: of one cache, as `caches` has it; all by default.

    Raises:
        ValueError: no cache is called so.

    Example::

        import xla_dtensor as xd

        xd.debug.clear_caches("plans")
        assert xd.debug.caches()["plans"].entries == 0
    """
    cache.clear(name)
    if name is None:
        gc.collect()
        if sys.platform == "linux":  # glibc keeps what lies between pieces in use: half of it
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)


def _row(record: CacheRecord) -> tuple[str, ...]:
    numbers = (record.entries, record.limit, record.hits, record.misses)
    entries, limit, hits, misses = ("" if n is None else str(n) for n in numbers)
    code = "" if record.bytes is None else _size(record.bytes)
    return record.name, entries, limit, code, hits, misses, record.note


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
