"""Copies of a run's state in the memory of its hosts: what is lost with a host its neighbour has.

Each process keeps what it would write to a checkpoint's folder in files of this host's memory
(``/dev/shm``), and what the same process of the next host has. When processes are started again
(`xla_dtensor.elastic`) they look what is there: as long as no two neighbours are gone, everything.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xla_dtensor.checkpoint.contents import save_state
from xla_dtensor.checkpoint.coordination import Together
from xla_dtensor.checkpoint.files import manifest as manifests
from xla_dtensor.checkpoint.files.manifest import Manifest, read_manifest
from xla_dtensor.errors import CheckpointError
from xla_dtensor.runtime import agreement, broadcast, processes

_log = logging.getLogger("xla_dtensor.checkpoint")

FOLDER = "XLA_DTENSOR_ELASTIC_FOLDER"
"""The variable with a folder that lives as long as this host takes part in a training."""

_METADATA = ".metadata"
_KEPT = 2  # steps: when a host is lost some may have the newest one, and others not yet


@dataclass(frozen=True)
class Held:
    """A step that the hosts have in memory.

    Attributes:
        step: which.
        manifest: of its checkpoint, as text.
        names: of each process the files that it has.
    """

    step: int
    manifest: str
    names: list[list[str]]

    @property
    def files(self) -> dict[str, Any]:
        """What the manifest says of each file."""
        return json.loads(self.manifest)["files"]


class HostCopies:
    """The copies that this process keeps.

    Args:
        root: its own folder, in memory.
        beside: how many processes a host has: so many numbers further on is the next host's.
    """

    def __init__(self, root: Path, beside: int) -> None:
        self._root, self._beside = root, beside

    def keep(self, together: Together, state: Mapping[str, Any], manifest: Manifest) -> None:
        """Keep a state. All processes call it.

        Args:
            together: of this save.
            state: what is saved.
            manifest: of it, without files.
        """
        try:
            self._keep(together, state, manifest)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or self._root}: {error.strerror}; copies in the host's memory "
                "(in_memory_every=) take four times what its devices have of the state"
            ) from error

    def _keep(self, together: Together, state: Mapping[str, Any], manifest: Manifest) -> None:
        # What bears a step's name is whole, as on a disk.
        unfinished = self._root / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        with together.telling():
            files = save_state(unfinished, state, together)
            metadata, about = unfinished / _METADATA, unfinished / manifests.NAME
            own = sorted(path.name for path in unfinished.iterdir() if path != metadata)
            if together.first:
                manifest.files = files
                manifest.write(unfinished)
            of_first = [path.read_bytes() for path in (metadata, about)] if together.first else None
            for path, content in zip(
                (metadata, about), together.share("all", of_first), strict=True
            ):
                path.write_bytes(content)
            if processes.count() > self._beside:
                self._take_from_neighbour(unfinished, own)
            together.share("kept")
        self._forget(manifest.step)
        unfinished.rename(self._root / f"step-{manifest.step:08d}")
        for _, old in self._steps()[_KEPT:]:
            shutil.rmtree(old)

    def _take_from_neighbour(self, folder: Path, own: list[str]) -> None:
        sizes = {name: (folder / name).stat().st_size for name in own}
        told = agreement.texts_of_all("keeps copies of a neighbour's state", json.dumps(sizes))
        theirs = json.loads(told[(processes.index() + self._beside) % processes.count()])
        content = b"".join((folder / name).read_bytes() for name in own)
        found = broadcast.shifted(np.frombuffer(content, np.uint8), self._beside)
        place = 0
        for name, size in theirs.items():
            (folder / name).write_bytes(found[place : place + size].tobytes())
            place += size

    def held(self) -> list[Held]:
        """The steps of which some process has each file, the newest first. All processes call
        it."""
        own = {}
        for step, path in self._steps():
            try:
                files = read_manifest(path).files
            except CheckpointError:
                continue  # of a process that was killed in it
            have = [n for n, (size, _) in files.items() if _size(path / n) == size]
            own[str(step)] = [(path / manifests.NAME).read_text(), have]
        told = [json.loads(t) for t in agreement.texts_of_all("looks for copies", json.dumps(own))]
        whole = []
        for step in sorted({int(step) for each in told for step in each}, reverse=True):
            found = [each.get(str(step), (None, [])) for each in told]
            texts = {text for text, _ in found if text is not None}
            held = Held(step, texts.pop(), [names for _, names in found])
            if not texts and held.files.keys() == {name for names in held.names for name in names}:
                whole.append(held)
        return whole

    def gathered(self, held: Held) -> Path:
        """A folder of this process's with all files of a step; others send what isn't here. All
        processes call it. What doesn't fit isn't there: whoever verifies the files will see."""
        folder = self._root / f"step-{held.step:08d}"
        with _as_far_as_it_fits():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / manifests.NAME).write_text(held.manifest)
        for name, about in sorted(held.files.items()):
            holders = [i for i, names in enumerate(held.names) if name in names]
            if len(holders) == processes.count():
                continue
            value = np.empty(about["bytes"], np.uint8)
            if processes.index() == holders[0]:
                value[:] = np.fromfile(folder / name, np.uint8)
            broadcast.send(value, holders[0])  # also where it can't be written: all call it
            if processes.index() not in holders:
                with _as_far_as_it_fits():
                    value.tofile(folder / name)
        return folder

    def forget_after(self, step: int) -> None:
        """Forget what comes after a step: the run goes on from there."""
        self._forget(step + 1)

    def _forget(self, step: int) -> None:
        for found, path in self._steps():
            if found >= step:
                shutil.rmtree(path)

    def _steps(self) -> list[tuple[int, Path]]:
        """The newest first."""
        paths = self._root.glob("step-*")
        return sorted(((int(path.name[5:]), path) for path in paths), reverse=True)


def of_this_process(run: Path) -> HostCopies | None:
    """What this process keeps; None where nobody would start it again.

    Args:
        run: the folder with the checkpoints of the same run.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return None
    name = f"{zlib.crc32(str(run.absolute()).encode()):08x}"
    own = Path(folder) / "memory" / name / os.environ.get("LOCAL_RANK", "0")
    return HostCopies(own, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextlib.contextmanager
def _as_far_as_it_fits() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _log.warning("a copy of the state doesn't fit into this host's memory: %s", error)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1
