"""Writing with ``torch.distributed.checkpoint``, with checksums, and until it is on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter as TorchWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from xla_dtensor.checkpoint.streams import Stream
from xla_dtensor.errors import CheckpointError

_CHECKSUMS = "xla_dtensor.checksums"


class FileSystemWriter(TorchWriter):
    """Writes what torch's writer does, and knows the checksum of each file.

    Attributes:
        files: per name of a file of any process, its size and CRC-32; complete after ``finish``.
    """

    def __init__(self, path: Path) -> None:
        # Shards come from the host, one by one: nothing is to be copied ahead, which torch would
        # wait for by waiting for the devices.
        super().__init__(path, sync_files=False, per_thread_copy_ahead=0)
        self._own_files: dict[str, tuple[int, int]] = {}
        self.files: dict[str, tuple[int, int]] = {}
        self.fs = _Files(self._own_files)

    def write_data(self, plan: Any, planner: Any) -> Any:
        future = super().write_data(plan, planner)
        # To the process that writes the manifest, by way of torch's results.
        index = MetadataIndex(_CHECKSUMS, index=0)
        future.value().append(WriteResult(index, 0, dict(self._own_files)))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        kept = []
        for of_process in results:
            kept.append([r for r in of_process if r.index.fqn != _CHECKSUMS])
            for result in of_process:
                if result.index.fqn == _CHECKSUMS:
                    self.files.update(result.storage_data)
        self._own_files.clear()
        super().finish(metadata, kept)
        for name, about in self._own_files.items():
            self.files[name.removesuffix(".tmp")] = about  # torch renames its metadata


class _Files(FileSystem):
    """torch's file system, whose streams count, and are on the disk when they are closed."""

    def __init__(self, files: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self._files = files

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        path = Path(path)
        try:
            with path.open(mode, buffering=0) as raw:
                if "w" not in mode:
                    yield raw
                    return
                stream = Stream(raw)
                yield stream
                stream.sync()
                self._files[path.name] = stream.position, stream.checksum
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
