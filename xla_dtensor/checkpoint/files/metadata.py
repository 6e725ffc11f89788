"""Reads and checks a checkpoint's metadata without trusting it.

torch keeps a checkpoint's metadata as a pickle, which could run anything. Here only its own plain
classes are made of it, and what it says is compared with the files before memory is taken.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from xla_dtensor.base.torch_private import MemoryFormatEncoding, StorageInfo, get_layout
from xla_dtensor.errors import CheckpointError

_CLASSES: list[Any] = [
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    MemoryFormatEncoding,
    StorageInfo,
]
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(each.__module__, each.__name__): each for each in _CLASSES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): get_layout,
    ("collections", "OrderedDict"): dict,
    # Where it was saved, which nobody asks.
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PureWindowsPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib._local", "WindowsPath"): PureWindowsPath,
}


_LONGEST_LIST = 2**20


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            if not isinstance(found, torch.dtype):
                found = None
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


def read_metadata(path: Path) -> Metadata:
    """The metadata in a file.

    Raises:
        CheckpointError: there is no such file, it is no metadata, or names what isn't plain data.
    """
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except OSError as error:
        raise CheckpointError(f"{path}: no metadata of a checkpoint ({error.strerror})") from error
    except Exception as error:  # a pickle that is damaged raises anything
        raise CheckpointError(
            f"{path}: no metadata of a checkpoint ({type(error).__name__}: {error}). If you trust "
            "it, torch's reader unpickles anything: dcp.load(..., storage_reader=reader), with one "
            "of a subclass of torch.distributed.checkpoint.FileSystemReader"
        ) from error
    problem = _problem(found)
    if problem is not None:
        raise CheckpointError(f"{path}: no metadata of a checkpoint ({problem})")
    return found


def check_files(metadata: Metadata, folder: Path) -> None:
    """Compare what the metadata says of the files with the files.

    Raises:
        CheckpointError: a file is missing, lies elsewhere or is too short, or is to hold more
            elements than it has bytes.
    """
    sizes: dict[str, int] = {}
    taken: list[tuple[str, int, int]] = []
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if name not in sizes:
            sizes[name] = size_of_file(folder, name)
        if info.offset < 0 or info.length < 0 or info.offset + info.length > sizes[name]:
            raise CheckpointError(
                f"{folder / name}: the file has {sizes[name]} bytes, and {index.fqn!r} is to be at "
                f"{info.offset} with {info.length}: it is truncated, or of another checkpoint"
            )
        taken.append((name, info.offset, info.offset + info.length))
    taken.sort()
    for (name, _, end), (other, begin, _) in itertools.pairwise(taken):
        if name == other and begin < end:
            raise CheckpointError(f"{folder / name}: two entries are to be at {begin}")
    for fqn, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            if MetadataIndex(fqn) not in metadata.storage_data:
                raise CheckpointError(f"{folder}: its metadata lacks the place of {fqn!r}")
            continue
        for chunk in entry.chunks:
            info = metadata.storage_data.get(MetadataIndex(fqn, chunk.offsets))
            if info is None:
                raise CheckpointError(
                    f"{folder}: its metadata lacks the place of {fqn!r} at {list(chunk.offsets)}"
                )
            needed = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
            if needed > info.length and not info.transform_descriptors:
                raise CheckpointError(
                    f"{folder / info.relative_path}: {fqn!r} at {list(chunk.offsets)} is to have "
                    f"{list(chunk.sizes)} elements of {entry.properties.dtype}, {needed} bytes, in "
                    f"{info.length}"
                )


def check_complete(metadata: Metadata, names: Iterable[str], where: Any) -> None:
    """Raise if chunks of the tensors of these names are missing.

    Raises:
        CheckpointError: they are.
    """
    for name in names:
        entry = metadata.state_dict_metadata.get(name)
        if isinstance(entry, TensorStorageMetadata):
            have = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if have != math.prod(entry.size):
                raise CheckpointError(
                    f"{where}: of the {math.prod(entry.size)} elements of {name!r} the checkpoint "
                    f"has {have}; was it saved by all processes?"
                )


def size_of_file(folder: Path, name: str) -> int:
    """The size of the file ``name`` in ``folder``, in bytes.

    Raises:
        CheckpointError: it isn't in there, or is no file.
    """
    path = inside(folder, name)
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, or no file")
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def inside(folder: Path, name: Any, links: bool = False) -> Path:
    """The path of ``name``, which a checkpoint says is in ``folder``.

    Args:
        links: whether it may be a link to another folder.

    Raises:
        CheckpointError: it would be elsewhere.
    """
    path = folder / str(name)
    pure = PurePosixPath(str(name).replace("\\", "/"))
    leaves = pure.is_absolute() or ".." in pure.parts or PureWindowsPath(str(name)).drive
    if leaves or not isinstance(name, str) or not pure.parts or "\0" in name:
        raise CheckpointError(f"{folder}: its metadata names {name!r}, which isn't in this folder")
    if not links and path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{path}: a link that leaves the folder of the checkpoint")
    return path


def _problem(found: Any) -> str | None:
    """What is wrong with unpickled metadata, whose fields may be anything."""
    if not isinstance(found, Metadata):
        return f"it is a {type(found).__name__}"
    entries, places = (vars(found).get(key) for key in ("state_dict_metadata", "storage_data"))
    if not isinstance(entries, dict) or not isinstance(places, dict):
        return "it has no entries and places"
    for fqn, entry in entries.items():
        problem = _problem_of_entry(entry)
        if problem is not None or not isinstance(fqn, str):
            return f"the entry {fqn!r} {problem or 'has no name'}"
    problem = _problem_of_paths(vars(found).get("planner_data"))
    if problem is not None:
        return problem
    for index, info in places.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, StorageInfo):
            return f"the place of {index!r} is none"
        fields = vars(info)
        numbers = fields.get("offset"), fields.get("length")
        if not isinstance(fields.get("relative_path"), str) or not _is_shape(numbers):
            return f"the place of {index!r} is none"
    return None


def _problem_of_paths(paths: Any) -> str | None:
    """Where entries are in nested dicts and lists."""
    if paths is None:
        return None
    if not isinstance(paths, dict):
        return "its paths are none"
    for name, path in paths.items():
        if not isinstance(path, tuple) or not path or not isinstance(path[0], str):
            return f"the path of {name!r} is none"
        for part in path:
            if not isinstance(part, str) and not (type(part) is int and 0 <= part < _LONGEST_LIST):
                return f"the path of {name!r} is none"
    return None


def _problem_of_entry(entry: Any) -> str | None:
    if isinstance(entry, BytesStorageMetadata):
        return None
    if not isinstance(entry, TensorStorageMetadata):
        return f"is a {type(entry).__name__}"
    fields = vars(entry)
    size, chunks, properties = (fields.get(key) for key in ("size", "chunks", "properties"))
    if not isinstance(properties, TensorProperties):
        return "has no properties"
    if not isinstance(vars(properties).get("dtype"), torch.dtype):
        return "has no dtype"
    if not isinstance(size, tuple) or not _is_shape(size) or not isinstance(chunks, list):
        return "has no size"
    for chunk in chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            return "has a chunk that is none"
        offsets, sizes = (vars(chunk).get(key) for key in ("offsets", "sizes"))
        if not isinstance(offsets, tuple) or not isinstance(sizes, tuple):
            return "has a chunk without a shape"
        if not (_is_shape(offsets) and _is_shape(sizes) and len(offsets) == len(sizes)):
            return "has a chunk without a shape"
        ends = [o + n for o, n in zip(offsets, sizes, strict=True)]
        if len(ends) != len(size) or any(e > n for e, n in zip(ends, size, strict=True)):
            return f"of size {list(size)} has a chunk that ends at {ends}"
    return None


def _is_shape(value: tuple[Any, ...]) -> bool:
    return all(type(n) is int and n >= 0 for n in value)
