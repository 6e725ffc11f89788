"""A file stream that starts writing to disk as it is filled, not only at the final sync.

And what is raised where something can't be written.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import platform
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xla_dtensor.errors import CheckpointError
from xla_dtensor.runtime import processes

_BEHIND = 32 * 2**20
_FULL = errno.ENOSPC, errno.EDQUOT


class FileStream(io.RawIOBase):
    """A file that is written once, counted, and on its way to the disk while it is.

    Linux would begin to write it to the disk when there is much to write, or a sync asks for it,
    which would then wait for all of it.

    Args:
        raw: opened without a buffer.

    Attributes:
        position: how many bytes have been written.
        checksum: their CRC-32.
        failed: why a write has failed, or None. ``torch.save`` goes on to close its archive then,
            and raises what is wrong with that.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._begun = 0
        self.position, self.checksum = 0, 0
        self.failed: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        count = len(left)
        self.checksum = zlib.crc32(left, self.checksum)
        while len(left):
            try:
                written = self._raw.write(left)
            except OSError as error:
                self.failed = error
                raise
            self.position, left = self.position + written, left[written:]
            if self.position - self._begun >= _BEHIND:
                self._begin()
        return count

    def _begin(self) -> None:
        length = self.position - self._begun
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fileno(), self._begun, length, os.POSIX_FADV_DONTNEED)
        self._begun = self.position

    def sync(self) -> None:
        """Wait until it is on the disk."""
        os.fsync(self.fileno())

    def tell(self) -> int:
        return self.position

    def fileno(self) -> int:
        return self._raw.fileno()


def not_written(path: Path, error: OSError) -> CheckpointError:
    """What is raised where a file or folder can't be written: which, by whom, on which machine,
    and of a disk that is full how much is free."""
    path = Path(error.filename or path)
    free = ""
    if error.errno in _FULL:
        # The file itself may not have come into being, or be gone with what was unfinished.
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        free = f", where {shutil.disk_usage(folder).free} bytes are free"
    return CheckpointError(
        f"{path}: {error.strerror} (process {processes.index()} on {platform.node()}{free})"
    )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `not_written` where the block can't write."""
    try:
        yield
    except OSError as error:
        raise not_written(path, error) from error
