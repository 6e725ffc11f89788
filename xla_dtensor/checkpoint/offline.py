"""Inspects and converts checkpoints of any format without devices."""

from __future__ import annotations

import copy
import functools
import io
import os
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from xla_dtensor.checkpoint.contents import save_state
from xla_dtensor.checkpoint.files.manifest import NAME as MANIFEST
from xla_dtensor.checkpoint.files.manifest import Manifest, read_manifest, sync_folder, verify
from xla_dtensor.checkpoint.files.metadata import check_complete, check_files, inside, read_metadata
from xla_dtensor.checkpoint.files.reading import plain_data
from xla_dtensor.checkpoint.files.records import StoredBox, Window, read_parts, stored_tensor
from xla_dtensor.checkpoint.files.safetensors_format import (
    INDEX,
    files_of,
    read_header,
    write_files,
)
from xla_dtensor.checkpoint.folders import Folder
from xla_dtensor.checkpoint.shards import Chunk, Own
from xla_dtensor.checkpoint.stand_ins import Departing
from xla_dtensor.errors import CheckpointError

FORMATS = ("dcp", "safetensors", "torch")


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a checkpoint.

    Attributes:
        dtype, sizes: of it.
        layout: how it was laid out when it was saved, as far as the checkpoint says.
        path: where it is in nested dicts and lists.
        read: its value, on the CPU.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    layout: str
    path: tuple[Any, ...]
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass
class Checkpoint:
    """What is in a checkpoint.

    Attributes:
        format: one of `FORMATS`.
        path: the file or folder.
        tensors: by name.
        others: the entries that are no tensors: by name where they are, and their values.
        files: those that it consists of.
        manifest: the manager's, if it has one.
    """

    format: str
    path: Path
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    others: dict[str, tuple[tuple[Any, ...], Callable[[], Any]]] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    manifest: Manifest | None = None


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at ``path``: of ``torch.distributed.checkpoint``, the newest of a manager's
    folder, of safetensors files, or of ``torch.save``.

    Raises:
        CheckpointError: there is none, or it says of itself what can't be.
    """
    if (path / ".metadata").exists() or (path / MANIFEST).exists():
        return _open_dcp(path)
    if path.is_dir() and (steps := Folder(path).steps()):
        return _open_dcp(steps[0][1])
    is_safe = path.name.endswith((".safetensors", ".json")) or (path / INDEX).exists()
    if is_safe or (path.is_dir() and any(path.glob("*.safetensors"))):
        return _open_safetensors(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no checkpoint")
    return _open_torch(path)


def _open_dcp(folder: Path) -> Checkpoint:
    manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
    metadata = read_metadata(folder / ".metadata")
    check_files(metadata, folder)
    found = Checkpoint("dcp", folder, manifest=manifest)
    names = sorted({info.relative_path for info in metadata.storage_data.values()})
    found.files = [folder / ".metadata", *(folder / name for name in names)]
    paths = metadata.planner_data or {}
    layouts = {} if manifest is None else manifest.tensors
    for name, entry in metadata.state_dict_metadata.items():
        path = tuple(paths.get(name, (name,)))
        if isinstance(entry, TensorStorageMetadata):
            chunks = len(entry.chunks)
            told = layouts.get(name, f"{chunks} shard{'s' if chunks != 1 else ''}")
            read = _reader_of_dcp(folder, metadata, name)
            sizes = tuple(entry.size)
            found.tensors[name] = TensorEntry(entry.properties.dtype, sizes, told, path, read)
        else:
            info = metadata.storage_data[MetadataIndex(name)]
            found.others[name] = path, _reader_of_bytes(folder, info)
    return found


def _reader_of_dcp(folder: Path, metadata: Any, name: str) -> Callable[[], torch.Tensor]:
    entry = metadata.state_dict_metadata[name]

    def read() -> torch.Tensor:
        check_complete(metadata, [name], folder)
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            path = inside(folder, info.relative_path)
            with path.open("rb", buffering=0) as file:
                try:
                    stored = stored_tensor(cast(BinaryIO, file), info.offset, info.length)
                    if stored.sizes != tuple(chunk.sizes) or stored.dtype != whole.dtype:
                        raise CheckpointError(
                            f"a tensor of sizes {list(stored.sizes)} and {stored.dtype}"
                        )
                    box = Chunk(tuple(chunk.offsets), tuple(chunk.sizes)).box
                    part = StoredBox((0,) * len(stored.sizes), whole[box])
                    read_parts(cast(BinaryIO, file), stored, [part])
                except CheckpointError as error:
                    raise CheckpointError(
                        f"{path}: {name!r} at {list(chunk.offsets)}: {error}"
                    ) from error
        return whole

    return read


def _reader_of_bytes(folder: Path, info: Any) -> Callable[[], Any]:
    def read() -> Any:
        path = inside(folder, info.relative_path)
        with path.open("rb") as file:
            file.seek(info.offset)
            try:
                return plain_data(io.BytesIO(file.read(info.length)))
            except Exception as error:  # a damaged pickle raises anything
                raise CheckpointError(
                    f"{path}: an entry that is no plain data ({str(error).splitlines()[0]})"
                ) from error

    return read


def _open_safetensors(path: Path) -> Checkpoint:
    found = Checkpoint("safetensors", path, files=files_of(path))
    for file in found.files:
        for name, stored in read_header(file)[0].items():
            if name in found.tensors:
                raise CheckpointError(f"{file}: {name!r} is in another file, too")

            def read(file: Path = file, stored: Any = stored) -> torch.Tensor:
                value = torch.empty(stored.sizes, dtype=stored.dtype)
                with file.open("rb", buffering=0) as opened:
                    part = StoredBox((0,) * len(stored.sizes), value)
                    read_parts(cast(BinaryIO, opened), stored, [part])
                return value

            found.tensors[name] = TensorEntry(stored.dtype, stored.sizes, file.name, (name,), read)
    return found


def _open_torch(path: Path) -> Checkpoint:
    try:
        mapped = zipfile.is_zipfile(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"{path}: no checkpoint that torch.load(weights_only=True) reads "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
    found = Checkpoint("torch", path, files=[path])
    for where, value in _leaves(content, ()):
        name = ".".join(map(str, where)) or "value"
        if isinstance(value, torch.Tensor):
            read = functools.partial(torch.Tensor.detach, value)
            found.tensors[name] = TensorEntry(value.dtype, tuple(value.shape), "", where, read)
        else:
            found.others[name] = where, functools.partial(copy.copy, value)
    return found


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The tensors in nested dicts and lists, and of the rest what has none in it."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(each, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(v, torch.Tensor | Mapping) for v in value):
        for i, each in enumerate(value):
            yield from _leaves(each, (*path, i))
    else:
        yield path, value


def verify_checkpoint(found: Checkpoint, told: Callable[[str], None]) -> None:
    """Read all of a checkpoint and compare it with the checksums that it has.

    Args:
        told: is given a line for each file.

    Raises:
        CheckpointError: a file is damaged; it names the file.
    """
    if found.manifest is not None:
        verify(found.path, found.manifest, lambda name: told(f"{name}: as it was written"))
    elif found.format == "safetensors":
        for file in found.files:
            told(f"{file.name}: complete; this format has no checksums")
    elif found.format == "torch":
        size = found.path.stat().st_size
        with found.path.open("rb") as archive:
            _verify_archive(found.path, "", cast(BinaryIO, archive), 0, size)
        told(f"{found.path.name}: its checksums are right")
    else:
        metadata = read_metadata(found.path / ".metadata")
        for index, info in metadata.storage_data.items():
            path = inside(found.path, info.relative_path)
            if not info.transform_descriptors:
                with path.open("rb") as shards:
                    opened = cast(BinaryIO, shards)
                    _verify_archive(path, f"{index.fqn!r}: ", opened, info.offset, info.length)
        for path in found.files[1:]:
            told(f"{path.name}: the checksums of its entries are right")


def _verify_archive(path: Path, what: str, file: BinaryIO, offset: int, length: int) -> None:
    try:
        with zipfile.ZipFile(Window(file, offset, length)) as archive:
            bad = archive.testzip()
    except Exception as error:  # a damaged archive raises anything
        raise CheckpointError(f"{path}: {what}damaged ({error})") from error
    if bad is not None:
        raise CheckpointError(f"{path}: {what}damaged ({bad})")


def convert(
    found: Checkpoint,
    target: Path,
    to: str,
    only: str = "",
    add: str = "",
    most_bytes: int = 5 * 10**9,
) -> list[str]:
    """Make a checkpoint of another format. Tensors are read one after another, but for a file of
    ``torch.save``, which is written from memory.

    Args:
        target: the file or folder, which mustn't exist.
        to: one of `FORMATS`.
        only: take the entries whose names begin so, and leave that away.
        add: what their names begin with then.
        most_bytes: of a safetensors file.

    Returns:
        the names of entries that the format can't hold, and that were left out.

    Raises:
        CheckpointError: it can't be read or written, or nothing is left.
    """
    if target.exists():
        raise CheckpointError(f"{target}: there is something already")
    tensors = {
        add + n.removeprefix(only): t for n, t in found.tensors.items() if n.startswith(only)
    }
    if not tensors:
        raise CheckpointError(f"{found.path}: no tensor whose name begins with {only!r}")
    # In one with other names, entries that are no tensors would refer to what isn't there.
    left_out = list(found.others) if only or add or to == "safetensors" else []
    unfinished = target.with_name(f".{target.name}.unfinished-{uuid.uuid4().hex[:8]}")
    try:
        if to == "safetensors":
            described = {name: (t.dtype, t.sizes) for name, t in tensors.items()}
            about = {"format": "pt"}
            write_files(unfinished, described, lambda n: tensors[n].read(), most_bytes, about)
        else:
            state: dict[Any, Any] = {}
            for name, tensor in tensors.items():
                value = _lazily(tensor) if to == "dcp" else tensor.read()
                _put(state, (name,) if only or add else tensor.path, value)
            for name, (path, read) in found.others.items():
                if name not in left_out:
                    _put(state, path, read())
            if to == "torch":
                with unfinished.open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
            else:
                unfinished.mkdir()
                files = save_state(unfinished, state)
                step = 0 if found.manifest is None else found.manifest.step
                layouts = {name: tensor.layout for name, tensor in tensors.items()}
                Manifest(step, files, layouts, {"made of": str(found.path)}).write(unfinished)
                sync_folder(unfinished)
        unfinished.rename(target)
        sync_folder(target.absolute().parent)
    except BaseException:
        if unfinished.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink(missing_ok=True)
        raise
    return left_out


def _lazily(tensor: TensorEntry) -> Departing:
    """A tensor that is read when it is written."""
    chunk = Chunk((0,) * len(tensor.sizes), tensor.sizes)
    return Departing(Own(tensor.sizes, {chunk: []}, [], ()), tensor.dtype, lambda _: tensor.read())


def _put(state: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set a value in nested dicts and lists, which are made where they aren't there yet."""
    for i, key in enumerate(path):
        if isinstance(state, list):
            state += [None] * (key + 1 - len(state))
        present = state[key] if isinstance(state, list) else state.get(key)
        if i + 1 == len(path):
            state[key] = value
        elif present is None:
            state[key] = [] if isinstance(path[i + 1], int) else {}
        state = state[key]
