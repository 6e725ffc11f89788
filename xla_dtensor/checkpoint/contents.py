"""Writes and reads one checkpoint's states in its folder, by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from xla_dtensor.base.torch_private import load_state_dict, save_state_dict
from xla_dtensor.checkpoint.coordination import OwnParts, Together
from xla_dtensor.checkpoint.files.metadata import inside
from xla_dtensor.checkpoint.files.reading import (
    FileSystemReader,
    LoadPlannerOfPlainData,
    plain_data,
)
from xla_dtensor.checkpoint.files.writing import FileSystemWriter
from xla_dtensor.errors import CheckpointError
from xla_dtensor.runtime import processes

# Not ``dcp.save`` and ``load``, which warn where there is no process group.


def save_state(
    folder: Path, state: Mapping[str, Any], together: Together | None = None
) -> dict[str, tuple[int, int]]:
    """Write a state; returns per file its size and CRC-32, in process 0.

    Args:
        folder: the same one in all processes.
        together: the processes that save it; by default this one alone, or torch's.

    Raises:
        CheckpointError: a file can't be written, or another process has failed.
    """
    writer = FileSystemWriter(folder)
    if together is None or not processes.several():
        save_state_dict(dict(state), writer, no_dist=not _has_processes())
    else:
        save_state_dict(dict(state), writer, together, planner=OwnParts())
    return writer.files


def load_state(folder: Path, targets: dict[str, torch.Tensor], place: str | None = None) -> None:
    """Load into tensors, by the names that they have in the checkpoint.

    Args:
        place: what all processes call it, if each has a folder of its own.

    Raises:
        CheckpointError: one isn't there, or a file can't be read.
    """
    reader = FileSystemReader(folder)
    reader.place = place
    try:
        load_state_dict(
            targets,
            reader,
            planner=LoadPlannerOfPlainData(),
            no_dist=not _has_processes(),
        )
    except (RuntimeError, ValueError) as error:  # a key that is missing, another size
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: {error}") from error


def names_in(folder: Path) -> list[str]:
    """The names of all entries.

    Raises:
        CheckpointError: the metadata can't be read, or contradicts the files.
    """
    return list(FileSystemReader(folder).read_metadata().state_dict_metadata)


def read_entry(folder: Path, name: str) -> Any:
    """What is no tensor, of one entry.

    Raises:
        CheckpointError: there is none of that name, or it is no plain data.
    """
    metadata = FileSystemReader(folder).read_metadata()
    if not isinstance(metadata.state_dict_metadata.get(name), BytesStorageMetadata):
        raise CheckpointError(f"{folder}: a checkpoint without {name!r}, made by something else?")
    info = metadata.storage_data[MetadataIndex(name)]
    path = inside(folder, info.relative_path)
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            return plain_data(io.BytesIO(file.read(info.length)))
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path}: {name!r} can't be read ({error})") from error


def read_saved(folder: Path, name: str) -> Any:
    """What ``torch.save`` has made bytes of, which are one entry.

    Raises:
        CheckpointError: there is none of that name, or it is no plain data.
    """
    content = read_entry(folder, name)
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{folder}: {name!r} is no plain data ({error})") from error


def described(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The dtypes and sizes of the tensors in a checkpoint.

    Raises:
        CheckpointError: its metadata can't be read, or contradicts the files.
    """
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (entry.properties.dtype, tuple(entry.size))
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _has_processes() -> bool:
    """Whether torch has processes that save together, not JAX."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()
