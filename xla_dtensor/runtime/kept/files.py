"""`KeptFiles`: contents by name in a folder that processes share, which hold or aren't there.

A file is written beside its place and put there whole, so of two processes that write it at once
one is last, and whoever reads sees all of one of them. What is not whole all the same (a full disk,
a machine that stopped) is told by gzip's checksum, and counts as not there.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import threading
import time
import zlib
from pathlib import Path

_LEFT = 3600.0  # seconds, after which an unfinished file was left by a dead process


class KeptFiles:
    """Contents by name.

    Args:
        folder: where they are, and nothing else; made when something is written.
        ending: of their files' names.
        limit: of their bytes on disk; what was not used for longest goes.
        looks: one of so many contents has all files looked at, which takes 30 us for each.
    """

    def __init__(self, folder: Path, ending: str, limit: float, looks: int = 1) -> None:
        self._folder, self._ending, self._limit, self._looks = folder, ending, limit, looks

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{self._ending}"

    def has(self, name: str) -> bool:
        """Whether there is a file, which may yet turn out to be no whole one."""
        return self._path(name).exists()

    def read(self, name: str) -> bytes | None:
        """What was written under the name, or None."""
        path = self._path(name)
        try:
            written = path.read_bytes()
            content = gzip.decompress(written)
        except (OSError, EOFError, ValueError, zlib.error):  # none, or half of one
            return None
        if not written:  # which gzip takes for nothing, compressed
            return None
        with contextlib.suppress(OSError):  # of somebody else, or on a disk that is read only
            os.utime(path)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Keep it, if the folder can be written to."""
        path = self._path(name)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(gzip.compress(content, 1, mtime=0))
            unfinished.replace(path)
            if zlib.crc32(name.encode()) % self._looks == 0:
                self._make_room()
        except OSError:  # it can't, or there is no room
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def _make_room(self) -> None:
        """Remove what is too much, and what killed processes have left."""
        found = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another process has removed it
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total = 0
        for used, size, path in sorted(found, reverse=True):
            total += size
            left = not path.name.endswith(self._ending) and time.time() - used > _LEFT
            if total > self._limit or left:
                path.unlink(missing_ok=True)
