"""The manifest of a checkpoint: its files, with sizes and checksums.

The manifest is written last. A folder without one, or with one that doesn't agree with the files,
is no checkpoint.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xla_dtensor.checkpoint.files.metadata import inside, size_of_file
from xla_dtensor.checkpoint.files.streams import writing
from xla_dtensor.errors import CheckpointError

NAME = "manifest.json"
_FORMAT = 1
_BLOCK = 4 * 2**20
_MOST = 256 * 2**20  # bytes of a manifest


@dataclass
class Manifest:
    """What is in the folder of a checkpoint.

    Attributes:
        step: after how many steps it was saved.
        files: per name the size in bytes and the CRC-32.
        tensors: per name how it was laid out, as text; see `states.layout_text`.
        about: who has saved it, when.
    """

    step: int
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it, and wait until it is on the disk.

        Raises:
            CheckpointError: it can't be written.
        """
        content = {
            "format": _FORMAT,
            "step": self.step,
            "files": {
                name: {"bytes": size, "crc32": f"{checksum:08x}"}
                for name, (size, checksum) in sorted(self.files.items())
            },
            "tensors": self.tensors,
            "about": self.about,
        }
        content["crc32"] = f"{_checksum_of(content):08x}"
        path = folder / NAME
        with writing(path), path.open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / NAME
    try:
        if path.stat().st_size > _MOST:
            raise CheckpointError(f"{path}: no manifest of a checkpoint (too long)")
        content = json.loads(path.read_text())
        checksum = int(content.pop("crc32"), 16)
        found = _checksum_of(content)
        if content["format"] != _FORMAT:
            raise CheckpointError(f"{path}: of format {content['format']!r}; this reads {_FORMAT}")
        manifest = Manifest(
            int(content["step"]),
            {
                str(name): (int(about["bytes"]), int(about["crc32"], 16))
                for name, about in content["files"].items()
            },
            {str(name): str(layout) for name, layout in content["tensors"].items()},
            dict(content["about"]),
        )
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except Exception as error:  # whatever JSON of another shape leads to
        raise CheckpointError(
            f"{path}: no manifest of a checkpoint ({type(error).__name__}: {error})"
        ) from error
    if found != checksum:
        raise CheckpointError(
            f"{path}: its checksum is {found:08x}, and {checksum:08x} is written in it"
        )
    return manifest


def verify(
    folder: Path,
    manifest: Manifest,
    told: Callable[[str], None] | None = None,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Read all files and compare them with the manifest.

    Args:
        told: is given the name of each file that is right.
        part: ``(i, n)``: of n processes the i-th, which reads each n-th file.

    Raises:
        CheckpointError: a file is missing, or isn't what was written; it names the file.
    """
    for name, (size, _) in manifest.files.items():
        found = size_of_file(folder, name)
        if found != size:
            raise CheckpointError(
                f"{folder / name}: it has {found} bytes, and {size} were written: "
                f"{'truncated' if found < size else 'changed'}"
            )
    index, count = part
    for name, (_, checksum) in list(manifest.files.items())[index::count]:
        found = _checksum_of_file(inside(folder, name))
        if found != checksum:
            raise CheckpointError(
                f"{folder / name}: its checksum is {found:08x}, and was {checksum:08x} when it was "
                "written: the file is damaged"
            )
        if told is not None:
            told(name)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _checksum_of_file(path: Path) -> int:
    checksum, buffer = 0, bytearray(_BLOCK)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                checksum = zlib.crc32(memoryview(buffer)[:count], checksum)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    return checksum
