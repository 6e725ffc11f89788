"""What a compiler has said of a program for devices that aren't here, kept between runs.

JAX keeps no such program (`runtime/program_cache.py:not_kept`), and compiling one takes minutes.
What a plan needs of it are its text, its memory and XLA's analysis of its cost. They are found
again by a digest of the program that went in, and of all that the compiler knew beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jaxlib

from xla_dtensor.base.config import config
from xla_dtensor.planning.memory import Memory
from xla_dtensor.runtime import program_cache
from xla_dtensor.runtime.kept.files import KeptFiles
from xla_dtensor.runtime.topologies import Topology

MAX_BYTES = 2**29
"""What was not used for longest goes."""
_ENDING = ".plan.gz"
_NAME = re.compile(r'^#\w+ = loc\("([^"]*[(/:][^"]*)"\(', re.MULTILINE)
"""Of an operation, by the modules that it is in: ``jit(step)/nn:layers.0/sin``. A file's has no
parenthesis behind it, and that of a Python function that called has none of these in it."""
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
    files = KeptFiles(folder, _ENDING, MAX_BYTES)
    found = _read(files.read(key))
    if found is None:
        found = ask()
        files.write(key, json.dumps(dataclasses.asdict(found)).encode())
    return found


def _read(content: bytes | None) -> Said | None:
    if content is None:
        return None
    values = json.loads(content)
    memory = values.pop("memory")
    memory["largest"] = tuple(memory["largest"])
    return Said(Memory(**memory), **{**values, "notes": tuple(values["notes"])})
