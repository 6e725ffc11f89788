"""The folder of a `CheckpointManager`: lists, adds and removes checkpoints atomically.

Each step has a folder of its own. It is written under another name, and renamed when all of it is
on the disk; it is renamed again before it is removed. So what bears the name of a step is whole,
whenever the process or the machine stops.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xla_dtensor.checkpoint.files.manifest import sync_folder
from xla_dtensor.checkpoint.files.streams import writing
from xla_dtensor.errors import CheckpointError
from xla_dtensor.runtime import agreement, processes

_STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED, _REMOVED = ".unfinished-", ".removed-"
_LOCK = ".lock"


class Folder:
    """The checkpoints of one run.

    Args:
        path: the folder; made with the first checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Any = None

    def steps(self) -> list[tuple[int, Path]]:
        """The steps of which there is a checkpoint, and their folders, newest first.

        Raises:
            CheckpointError: the folder can't be read.
        """
        try:
            names = [entry.name for entry in os.scandir(self.path)] if self.path.exists() else []
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from error
        found = []
        for name in names:
            match = _STEP.fullmatch(name)
            if match is not None:
                step, attempt = match.groups()
                found.append((int(step), int(attempt or 0), self.path / name))
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def check_same_in_all(self) -> None:
        """Raise if the processes don't all see the same folder.

        Raises:
            CheckpointError: they don't.
        """
        own = ", ".join(path.name for _, path in self.steps()) or "no checkpoint"
        found = agreement.texts_of_all("looks for checkpoints", own)
        for index, text in enumerate(found):
            if text != found[0]:
                raise CheckpointError(
                    f"{self.path} isn't the same folder in all processes: {processes.known(0)} "
                    f"sees {found[0]}, {processes.known(index)} sees {text}; give a folder on a "
                    "file system that their hosts share"
                )

    @contextlib.contextmanager
    def adding(self, step: int) -> Iterator[Path]:
        """A folder to write a checkpoint of ``step`` to. It is added when the block ends; if the
        block raises, nothing is.

        Raises:
            CheckpointError: the folder can't be written to, or another process does.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            unfinished = self.path / f"{_UNFINISHED}{step:08d}-{uuid.uuid4().hex[:8]}"
            unfinished.mkdir()
        try:
            yield unfinished
            with writing(self.path):
                # The content first, then the name: a machine that stops in between has an
                # unfinished folder, and never half a checkpoint under the name of a step.
                sync_folder(unfinished)
                unfinished.rename(self._name_for(step))
                sync_folder(self.path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _name_for(self, step: int) -> Path:
        """A name that isn't taken: a checkpoint of this step that is damaged may be there."""
        attempts = [path for found, path in self.steps() if found == step]
        if not attempts:
            return self.path / f"step-{step:08d}"
        match = _STEP.fullmatch(attempts[0].name)
        assert match is not None
        return self.path / f"step-{step:08d}.{int(match.group(2) or 0) + 1}"

    def remove(self, path: Path) -> None:
        """Remove a checkpoint.

        Raises:
            CheckpointError: it can't be removed.
        """
        removed = self.path / f"{_REMOVED}{path.name}-{uuid.uuid4().hex[:8]}"
        with writing(path):
            path.rename(removed)
            shutil.rmtree(removed)

    def _take_lock(self) -> None:
        """Make sure that no other process adds checkpoints here, and remove what one that was
        stopped has left."""
        if self._lock is not None:
            return
        path = self.path / _LOCK
        lock = path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().strip()
            lock.close()
            raise CheckpointError(
                f"{path}: another process ({owner or 'unknown'}) saves its checkpoints in this "
                "folder; give each run a folder of its own"
            ) from error
        except OSError:  # a file system without locks
            pass
        lock.truncate(0)
        lock.write(f"process {os.getpid()}")
        lock.flush()
        self._lock = lock
        for entry in os.scandir(self.path):
            if entry.name.startswith((_UNFINISHED, _REMOVED)):
                shutil.rmtree(entry.path, ignore_errors=True)

    def close(self) -> None:
        """Let other processes add checkpoints."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
