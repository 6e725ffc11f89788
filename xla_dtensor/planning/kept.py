"""What a compiler has said of a program for devices that aren't here, kept between runs.

JAX keeps no such program (`runtime/program_cache.py:not_kept`), and compiling one takes minutes.
What a plan needs of it are its text, its memory and XLA's analysis of its cost. They are found
again by a digest of the program that went in, and of all that the compiler knew beside it.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jaxlib

from xla_dtensor.base.config import config
from xla_dtensor.planning.memory import Memory
from xla_dtensor.runtime import program_cache
from xla_dtensor.runtime.topologies import Topology

MAX_BYTES = 2**29
"""What was not used for longest goes."""
_ENDING = ".plan.gz"
_NAME = re.compile(r'^#\w+ = loc\("([^"]*)"\(', re.MULTILINE)
"""Of an operation, by the modules that it is in; a file's has no parenthesis behind it."""
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclass(frozen=True)
class Said:
    """What the compiler has said.

    Attributes:
        memory: that the program needs.
        text: of the compiled program, "" where the compiler has refused it.
        cost: XLA's analysis, by its own names.
        notes: on what is unknown.
    """

    memory: Memory
    text: str
    cost: Mapping[str, float]
    notes: tuple[str, ...]


def digest(
    lowered: Any,
    options: Mapping[str, Any],
    topology: Topology,
    devices: Iterable[Any],
    available: float | None,
) -> str:
    """Of a program and all that its compiler knows.

    Args:
        lowered: a ``jax.stages.Lowered``. The names of modules in it count: reports show them.
        options: the compiler's.
        topology: what it is compiled for.
        devices: JAX's, in the order of the program's mesh.
        available: a device's memory.
    """
    client = getattr(topology.devices[0], "client", None)
    compiler = getattr(client, "platform_version", "")
    beside = [
        *(jaxlib.__version__, compiler, topology.name, available),
        *([device.id for device in devices], sorted(options.items())),
        *map(os.environ.get, _FLAGS),
        *(field.name for kept in (Said, Memory) for field in dataclasses.fields(kept)),
    ]
    text, named = lowered.as_text(), lowered.as_text(debug_info=True)
    names = "\n".join(_NAME.findall(named))  # without the lines of Python that called
    return hashlib.sha256(f"{beside!r}\n{text}\n{names}".encode()).hexdigest()


def said(key: str, ask: Callable[[], Said]) -> Said:
    """What is kept under ``key``, or what ``ask`` gives, which is kept from then on.

    Args:
        key: `digest`'s.
        ask: has the program compiled.
    """
    folder = program_cache.folder_of_plans(config.cache)
    if folder is None:
        return ask()
    path = folder / f"{key}{_ENDING}"
    found = _read(path)
    if found is None:
        found = ask()
        _write(path, found)
    return found


def _read(path: Path) -> Said | None:
    try:
        values = json.loads(gzip.decompress(path.read_bytes()))
        os.utime(path)
    except (OSError, EOFError, ValueError, zlib.error):  # none, or half of one
        return None
    memory = values.pop("memory")
    memory["largest"] = tuple(memory["largest"])
    return Said(Memory(**memory), **{**values, "notes": tuple(values["notes"])})


def _write(path: Path, found: Said) -> None:
    written = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(gzip.compress(json.dumps(dataclasses.asdict(found)).encode(), 3))
        written.replace(path)  # another process sees all of it, or nothing
        _make_room(path.parent)
    except OSError:  # a home that can't be written to, or no room: it is compiled each time
        written.unlink(missing_ok=True)


def _make_room(folder: Path) -> None:
    used = sorted(
        ((p.stat().st_mtime, p.stat().st_size, p) for p in folder.iterdir()), reverse=True
    )
    total = 0
    for _, size, path in used:
        total += size
        if total > MAX_BYTES:
            path.unlink(missing_ok=True)
