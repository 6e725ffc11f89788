"""Files in the safetensors format: a header in JSON, and the values of tensors one after another.

Read and written here and not by the `safetensors` package, which reads a tensor, or a slice of it,
into memory of its own, and writes a file from tensors that are all in memory. The format is at
https://huggingface.co/docs/safetensors; tests compare with the package.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from xla_dtensor.checkpoint.files.manifest import sync_folder
from xla_dtensor.checkpoint.files.metadata import inside
from xla_dtensor.checkpoint.files.records import StoredTensor, bytes_of
from xla_dtensor.checkpoint.files.streams import FileStream
from xla_dtensor.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes, as the package has it


def files_of(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files of a model.

    Args:
        source: a file, several, an index, or a folder with one or the other.

    Raises:
        CheckpointError: there are none, or the index names what isn't in its folder.
    """
    if isinstance(source, list | tuple):
        return [Path(each) for each in source]
    path = Path(source)  # type: ignore[arg-type]
    if path.is_dir():
        if (path / INDEX).exists():
            path = path / INDEX
        else:
            found = sorted(path.glob("*.safetensors"))
            if not found:
                raise CheckpointError(f"{path}: no {INDEX} and no *.safetensors in this folder")
            return found
    if path.suffix != ".json":
        return [path]
    try:
        index = json.loads(path.read_text())
        names = sorted(set(index["weight_map"].values()))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except Exception as error:  # whatever JSON of another shape leads to
        raise CheckpointError(
            f"{path}: no index of safetensors files ({type(error).__name__}: {error})"
        ) from error
    # Of a model in Hugging Face's cache the files are links to elsewhere.
    return [inside(path.parent, name, links=True) for name in names]


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Where the tensors of a file lie, and what the file says about itself.

    Raises:
        CheckpointError: it isn't in the format, or says of itself what can't be.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _header(file, size)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _header(file: BinaryIO, size: int) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
    if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
        raise CheckpointError(f"no safetensors file, or cut off: a header of {length} bytes")
    try:
        header = json.loads(file.read(length), object_pairs_hook=_without_twins)
        about = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in about.values()):
            raise ValueError("its __metadata__ isn't text")
        found = {name: _stored(entry, 8 + length) for name, entry in header.items()}
    except Exception as error:  # whatever JSON of another shape leads to
        raise CheckpointError(
            f"no safetensors file: a header that is none ({type(error).__name__}: {error})"
        ) from error
    end = 8 + length
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if tensor.begin != end:
            raise CheckpointError(
                f"{name!r} begins at {tensor.begin}, and what is before it at {end}"
            )
        end = tensor.begin + tensor.nbytes
    if end != size:
        raise CheckpointError(
            f"its tensors end at {end}, and it has {size} bytes: "
            f"{'it is cut off' if end > size else 'there is more'}"
        )
    return found, about


def _stored(entry: Any, begin: int) -> StoredTensor:
    dtype, sizes = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    first, last = entry["data_offsets"]
    numbers = (*sizes, first, last)
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"sizes and places {numbers}")
    if last - first != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"{last - first} bytes for {list(sizes)} elements of {dtype}")
    strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
    return StoredTensor(begin + first, dtype, sizes, strides)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name that occurs twice")
    return found


Described = tuple[torch.dtype, tuple[int, ...]]


def write_files(
    folder: Path,
    tensors: Mapping[str, Described],
    value_of: Callable[[str], torch.Tensor],
    most_bytes: int,
    about: Mapping[str, str],
) -> list[Path]:
    """Write tensors to as many files as are needed, and an index if that is more than one.

    Each file gets its name when it is complete, the index last. Files of an earlier save go.

    Args:
        tensors: their dtypes and sizes.
        value_of: a tensor's value, on the CPU; asked one after another.
        most_bytes: of a file; a larger tensor has one of its own.
        about: what a file says about itself.

    Returns:
        the files; the index isn't among them.

    Raises:
        CheckpointError: a file can't be written.
        TypeError: the format has no such dtype.
    """
    for name, (dtype, _) in tensors.items():
        if dtype not in _NAMES:
            raise TypeError(f"{name!r} is of {dtype}, which safetensors files don't have")
    groups: list[list[str]] = [[]]
    held = 0
    for name, described in tensors.items():
        if groups[-1] and held + _bytes_of(described) > most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += _bytes_of(described)
    many = len(groups)
    names = [f"model-{i:05d}-of-{many:05d}.safetensors" for i in range(1, many + 1)]
    paths = [folder / name for name in (names if many > 1 else [SINGLE])]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, group in zip(paths, groups, strict=True):
            with _completed(path) as file:
                _write(file, {name: tensors[name] for name in group}, value_of, about)
        if many > 1:
            total = sum(map(_bytes_of, tensors.values()))
            weight_map = {
                n: path.name for path, group in zip(paths, groups, strict=True) for n in group
            }
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            with _completed(folder / INDEX) as file:
                file.write(json.dumps(index, indent=2).encode())
        # What an earlier save has left would be read in place of these, or beside them.
        kept = {path.name for path in paths} | ({INDEX} if many > 1 else set())
        for path in folder.iterdir():
            if path.name not in kept and _OURS.fullmatch(path.name):
                path.unlink()
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror}") from error
    return paths


@contextlib.contextmanager
def _completed(path: Path) -> Iterator[FileStream]:
    """A file that gets its name when the block has ended and it is on the disk."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb", buffering=0) as raw:
            stream = FileStream(raw)
            yield stream
            stream.sync()
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _write(
    file: FileStream,
    tensors: Mapping[str, Described],
    value_of: Callable[[str], torch.Tensor],
    about: Mapping[str, str],
) -> None:
    header: dict[str, Any] = {"__metadata__": dict(about)}
    position = 0
    # Larger elements first, as the package does, so that each begins at a multiple of its size.
    order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    for name in order:
        dtype, sizes = tensors[name]
        end = position + _bytes_of(tensors[name])
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(sizes),
            "data_offsets": [position, end],
        }
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    for name in order:
        value = value_of(name)
        dtype, sizes = tensors[name]
        assert value.dtype == dtype and tuple(value.shape) == sizes
        file.write(bytes_of(value.contiguous()))
        del value  # before the next one is fetched


def _bytes_of(described: Described) -> int:
    dtype, sizes = described
    return math.prod(sizes) * dtype.itemsize
