"""Writing with ``torch.distributed.checkpoint``: with checksums, and synced to disk at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter as TorchWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from xla_dtensor.base.torch_private import StorageInfo
from xla_dtensor.checkpoint.files.streams import FileStream, not_written

_CHECKSUMS = "xla_dtensor.checksums"


class FileSystemWriter(TorchWriter):
    """Writes what torch's writer does, and knows the checksum of each file.

    Attributes:
        files: per name of a file of any process, its size and CRC-32; complete after ``finish``.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=False)  # the streams see to it
        self._own_files: dict[str, tuple[int, int]] = {}
        self.files: dict[str, tuple[int, int]] = {}
        self.fs = _Files(self._own_files)

    def write_data(self, plan: Any, planner: Any) -> Any:
        results = write_one_by_one(self, plan, planner)
        # To the process that writes the manifest, by way of torch's results.
        index = MetadataIndex(_CHECKSUMS, index=0)
        return _done([*results, WriteResult(index, 0, dict(self._own_files))])

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


class Writing:
    """torch's writer of files, which holds one shard of each tensor until all are written: here
    none is held once it is.

    Args:
        writer: torch's.
    """

    def __init__(self, writer: TorchWriter) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def write_data(self, plan: Any, planner: Any) -> Any:
        return _done(write_one_by_one(self._writer, plan, planner))

    @staticmethod
    def serves(writer: Any) -> bool:
        """Whether ``writer`` is torch's, and is to write one file as ``torch.save`` does."""
        return (
            type(writer) is TorchWriter
            and writer.single_file_per_rank
            and writer.thread_count == 1
            and writer.serialization_format == SerializationFormat.TORCH_SAVE
            and not writer.transforms.extensions
        )


def write_one_by_one(writer: TorchWriter, plan: Any, planner: Any) -> list[WriteResult]:
    """Write what a plan has to the one file of this process: as torch's writer does, but that
    nothing is kept."""
    name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
    results = []
    with writer.fs.create_stream(writer.fs.concat_path(writer.path, name), "wb") as stream:
        for item in plan.items:
            offset = stream.tell()
            value = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                stream.write(value.getbuffer())
            else:
                value = value.detach().cpu()
                if value.untyped_storage().size() != value.nbytes:
                    value = value.clone()  # torch.save would write all of the memory
                torch.save(value, cast(Any, stream))
            del value
            length = stream.tell() - offset
            info = StorageInfo(name, offset, length)
            results.append(WriteResult(item.index, length, info))
        if writer.sync_files:
            stream.flush()
            os.fsync(stream.fileno())
    return results


def _done(results: list[WriteResult]) -> Any:
    future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
    future.set_result(results)
    return future


class _Files(FileSystem):
    """torch's file system, whose streams count, and are on the disk when they are closed."""

    def __init__(self, files: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self._files = files

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        path, stream = Path(path), None
        try:
            with path.open(mode, buffering=0) as raw:
                if "w" not in mode:
                    yield raw
                    return
                stream = FileStream(raw)
                yield stream
                stream.sync()
                self._files[path.name] = stream.position, stream.checksum
        except (OSError, RuntimeError) as error:
            cause = error if stream is None or stream.failed is None else stream.failed
            if not isinstance(cause, OSError):
                raise
            raise not_written(path, cause) from cause
