"""Loading with ``torch.distributed.checkpoint``: tensor by tensor, only the bytes needed."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint import FileSystemReader as TorchReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from xla_dtensor.base.torch_private.attributes import metadata_path
from xla_dtensor.checkpoint.files.metadata import check_complete, check_files, inside, read_metadata
from xla_dtensor.checkpoint.files.records import StoredBox, read_parts, stored_tensor
from xla_dtensor.errors import CheckpointError


class FileSystemReader(TorchReader):
    """Reads what torch's ``FileSystemWriter`` has written: of each shard the bytes that are wanted,
    and none twice. Nothing is unpickled but plain data, and what the metadata says is compared with
    the files first. ``dcp.load(state, checkpoint_id=folder)`` uses it for xla tensors.

    Args:
        path: the folder of the checkpoint.

    Example::

        import tempfile, warnings, torch, torch.distributed.checkpoint as dcp, xla_dtensor as xd

        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"x": torch.ones(3, device="xla")}, checkpoint_id=folder)
            reader = xd.checkpoint.FileSystemReader(folder)
            assert str(reader.checkpoint_id) == folder
            assert list(reader.read_metadata().state_dict_metadata) == ["x"]
            state = {"x": torch.zeros(3)}
            dcp.load(state, storage_reader=reader)  # calls reader.read_data(plan, planner)
        assert state["x"].tolist() == [1, 1, 1]
    """

    place: str | None = None
    """What tells a load of several processes apart from others, where each reads in a folder of its
    own; by default the folder does."""

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """As torch has it: from where is read."""
        return self.place or super().checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata.

        Args:
            args: none.
            kwargs: ``rank``, of metadata of one rank.

        Raises:
            CheckpointError: it can't be read, names what is no plain data, or contradicts the
                files.
        """
        metadata = read_metadata(Path(metadata_path(self, kwargs.get("rank"))))
        check_files(metadata, Path(self.path))
        self._metadata = metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Read what a plan wants.

        Args:
            plan: made by ``planner``.
            planner: says where it goes.

        Raises:
            CheckpointError: a file is damaged.
        """
        check_complete(self._metadata, {item.storage_index.fqn for item in plan.items}, self.path)
        transformed = []
        per_place: dict[Any, list[ReadItem]] = {}
        for item in plan.items:
            if self.storage_data[item.storage_index].transform_descriptors:
                transformed.append(item)
            else:
                per_place.setdefault(item.storage_index, []).append(item)
        if transformed:
            super().read_data(LoadPlan(transformed), planner)
        per_file: dict[str, list[Any]] = {}
        for index in per_place:
            per_file.setdefault(self.storage_data[index].relative_path, []).append(index)
        for name, indices in per_file.items():
            path = inside(Path(self.path), name)
            try:
                with path.open("rb", buffering=0) as file:
                    for index in sorted(indices, key=lambda i: self.storage_data[i].offset):
                        self._read(file, index, per_place[index], planner)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}") from error
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from error
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _read(self, file: Any, index: Any, items: list[ReadItem], planner: LoadPlanner) -> None:
        info = self.storage_data[index]
        parts, targets = [], []
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                file.seek(info.offset)
                planner.load_bytes(item, io.BytesIO(file.read(info.length)))
                continue
            target = planner.resolve_tensor(item)
            if tuple(target.shape) != tuple(item.lengths):
                raise CheckpointError(
                    f"{index.fqn!r} at {index.offset}: {list(item.lengths)} elements are to be read"
                    f" into a tensor of shape {list(target.shape)}"
                )
            targets.append((item, target))
            parts.append(StoredBox(tuple(item.storage_offsets), target.detach()))
        if not parts:
            return
        try:
            stored = stored_tensor(file, info.offset, info.length)
            dtype = self._metadata.state_dict_metadata[index.fqn].properties.dtype
            if stored.dtype != dtype:
                raise CheckpointError(f"a tensor of {stored.dtype}, not {dtype}")
            for part in parts:
                ends = [o + n for o, n in zip(part.offsets, part.target.shape, strict=True)]
                if len(ends) != len(stored.sizes) or any(
                    end > n for end, n in zip(ends, stored.sizes, strict=True)
                ):
                    raise CheckpointError(f"a tensor of sizes {list(stored.sizes)}, too small")
            read_parts(file, stored, parts)
        except CheckpointError as error:
            raise CheckpointError(f"{index.fqn!r} at {index.offset}: {error}") from error
        for item, target in targets:
            planner.commit_tensor(item, target)


class LoadPlannerOfPlainData(DefaultLoadPlanner):
    """torch's planner, which unpickles nothing but what ``torch.load(weights_only=True)`` does."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take in what is no tensor.

        Raises:
            CheckpointError: it is an object of a class of its own.
        """
        try:
            loaded = plain_data(value)
        except Exception as error:  # a pickle that is damaged raises anything
            raise CheckpointError(
                f"{read_item.dest_index.fqn!r} in the checkpoint is no tensor and no plain data "
                f"({type(error).__name__}: {str(error).splitlines()[0]}). To unpickle it, which "
                "can run anything that is in the file, pass torch's planner: dcp.load(..., "
                "planner=torch.distributed.checkpoint.DefaultLoadPlanner())"
            ) from error
        again = io.BytesIO()
        torch.save(loaded, again)
        again.seek(0)
        super().load_bytes(read_item, again)


def plain_data(file: io.BytesIO) -> Any:
    """What ``torch.save`` has written to ``file``, if that is plain data, or an ``io.BytesIO``.

    Raises:
        Exception: it isn't.
    """
    try:
        return torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith("/data.pkl")]
            with contextlib.suppress(_NoBytes):
                return _UnpicklerOfBytes(io.BytesIO(archive.read(name))).load()
        raise


class _NoBytes(Exception):
    pass


class _UnpicklerOfBytes(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_io", "BytesIO"):
            return io.BytesIO
        if (module, name) == ("_codecs", "encode"):  # bytes, in pickles of protocol 2
            return _as_latin1
        raise _NoBytes


def _as_latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


class Reading:
    """A storage reader that reads tensor after tensor, and says when one is there.

    Args:
        reader: torch's interface of a reader.
        arrived: is called when all that has been read so far is complete.
    """

    def __init__(self, reader: Any, arrived: Callable[[], None]) -> None:
        self._reader, self._arrived = reader, arrived
        self._metadata: Metadata | None = None
        self.error: CheckpointError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            self._metadata = self._reader.read_metadata(*args, **kwargs)
        except CheckpointError as error:
            self.error = self.error or error
            raise
        return cast(Metadata, self._metadata)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        groups: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            groups.setdefault(item.dest_index.fqn, []).append(item)
        if self._metadata is not None:
            check_complete(self._metadata, groups, self._reader.checkpoint_id)
        result = None
        # Others than torch's may not expect to be asked twice.
        if isinstance(self._reader, TorchReader):
            for items in groups.values():
                result = self._reader.read_data(LoadPlan(items), planner)
                result.wait()
                self._arrived()
        if result is None:
            result = self._reader.read_data(plan, planner)
        return result
