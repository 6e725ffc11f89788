"""`CheckpointManager`: the checkpoints of a training run."""

from __future__ import annotations

import datetime
import functools
import io
import itertools
import logging
import os
import platform
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import torch

from xla_dtensor.base.tables import counters
from xla_dtensor.checkpoint.contents import (
    described,
    load_state,
    names_in,
    read_saved,
    save_state,
)
from xla_dtensor.checkpoint.coordination import RANDOM, Decisions, Together
from xla_dtensor.checkpoint.files.manifest import Manifest, read_manifest, verify
from xla_dtensor.checkpoint.folders import Folder
from xla_dtensor.checkpoint.memory import Held, of_this_process
from xla_dtensor.checkpoint.random_state import random_state, set_random_state
from xla_dtensor.checkpoint.states import STRUCTURE, States, snapshot
from xla_dtensor.checkpoint.stopping import Stopping, progress
from xla_dtensor.checkpoint.tensor_kinds import Kind, text_of
from xla_dtensor.errors import CheckpointError
from xla_dtensor.runtime import agreement, processes

_log = logging.getLogger("xla_dtensor.checkpoint")

_numbers = itertools.count()  # of managers: the same in all processes


class CheckpointManager:
    """Saves what a training run consists of, and finds it again.

    Each checkpoint has a folder of its own, which gets its name when all of it is on the disk: a
    run may be killed at any instant. It is in the format of ``torch.distributed.checkpoint``, with
    a manifest of checksums, and loads onto any mesh.

    Several processes make a manager each, of the same folder and the same objects, and call the
    same methods: each writes and reads what its devices hold. Values that are no xla tensors are
    process 0's, but random state is each process's own. They save and stop after the same step, on
    a signal to any of them.

    Args:
        folder: where the checkpoints are; one run saves there at a time.
        objects: by name, what is saved and restored: modules, optimizers, schedulers, data
            loaders and whatever else has ``state_dict`` and ``load_state_dict``; dicts of plain
            values; ``torch.Generator``s. Random state and the number of steps are saved with them.
        every: save after so many steps; None: only when `save` is called.
        every_seconds: save when so many seconds have gone by since the last time.
        keep_last: how many of the newest checkpoints stay; None: all.
        keep_every: those whose step divides by it stay for good.
        asynchronous: write in a thread of its own, from a copy in the memory of the host. A save
            waits until the one before it is written.
        signals: save and stop when one of them comes: `after_step` returns True. By default
            SIGTERM, which clusters send before they take a machine back.
        deadline: save and stop in time before it: seconds from now, or a ``datetime``.
        in_memory_every: under `xla_dtensor.elastic.run`, keep a copy of the state in the memory of
            two hosts after so many steps: when a host is lost, `restore` begins with that. It takes
            four times as much of a host's memory as its devices have of the state, and the whole
            state while it is restored.

    Attributes:
        skipped: per checkpoint that `restore` has found damaged its folder, and why.
        stopped_by: why `after_step` has returned True: the name of a signal, "deadline", or None.

    Raises:
        TypeError: an object can't be saved.
        ValueError: a number makes no sense.

    Example::

        import tempfile, torch, xla_dtensor as xd

        model = torch.nn.Linear(4, 4).to("xla")
        optimizer = torch.optim.AdamW(model.parameters())
        log = {"losses": []}
        with tempfile.TemporaryDirectory() as folder:
            objects = {"model": model, "optimizer": optimizer, "log": log}
            with xd.checkpoint.CheckpointManager(folder, objects, every=2) as manager:
                for step in range(manager.restore(), 5):
                    log["losses"].append(0.5 ** step)
                    if manager.after_step(step + 1):
                        break
                manager.save(5)  # the last step
                manager.wait()
                assert [step for step, _ in manager.checkpoints()] == [5, 4, 2]
            manager.close()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        objects: Mapping[str, Any],
        *,
        every: int | None = None,
        every_seconds: float | None = None,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        asynchronous: bool = True,
        signals: Sequence[int] = (signal.SIGTERM,),
        deadline: float | datetime.datetime | None = None,
        in_memory_every: int | None = None,
    ) -> None:
        numbers = {
            "every": every,
            "keep_last": keep_last,
            "keep_every": keep_every,
            "in_memory_every": in_memory_every,
        }
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise ValueError(f"CheckpointManager({name}={number}): give 1 or more, or None")
        if RANDOM in objects:
            raise ValueError(f"CheckpointManager: the name {RANDOM!r} is taken")
        self._folder = Folder(Path(folder))
        self._states = States(objects)
        self._every, self._every_seconds = every, every_seconds
        self._keep_last, self._keep_every = keep_last, keep_every
        self._asynchronous, self._in_memory_every = asynchronous, in_memory_every
        self._memory = None if in_memory_every is None else of_this_process(self._folder.path)
        self._stopping = Stopping(signals, deadline)
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._saved_step: int | None = None
        self._saved_at = self._step_at = time.monotonic()
        self._longest_step = self._longest_save = 0.0
        self._number, self._saves = next(_numbers), itertools.count()
        self._before = self._kept_before = Together(f"{self._number}/none")
        self._decisions = Decisions()
        self.skipped: list[tuple[Path, str]] = []
        self.stopped_by: str | None = None

    def checkpoints(self) -> list[tuple[int, Path]]:
        """The checkpoints in the folder, newest first.

        Returns:
            of each the number of steps that had been done, and its folder.

        Raises:
            CheckpointError: the folder can't be read.
        """
        return self._folder.steps()

    def restore(self, step: int | None = None) -> int:
        """Load the newest checkpoint that isn't damaged; all its files are read and compared with
        their checksums first. Those passed over are in `skipped`, and logged.

        Args:
            step: of the checkpoint to load; by default the newest.

        Returns:
            how many steps had been done when it was saved; 0 if there is no checkpoint at all, in
            which case nothing is changed.

        Raises:
            CheckpointError: all there are are damaged; there is none of ``step``; or the objects
                aren't those that were saved.
        """
        self.wait()
        self.skipped = []
        self._folder.check_same_in_all()
        found = [c for c in self._folder.steps() if step in (None, c[0])]
        ways = [(saved, functools.partial(self._restores, path)) for saved, path in found]
        if step is None and self._memory is not None:
            ways += [
                (held.step, functools.partial(self._restores_from_memory, held))
                for held in self._memory.held()
            ]
        for saved, restores in sorted(ways, key=lambda way: -way[0]):
            if restores():
                self._saved_at = self._step_at = time.monotonic()
                if self._memory is not None:
                    self._memory.forget_after(saved)
                return saved
        if self.skipped:
            told = "\n".join(f"  {path.name}: {why}" for path, why in self.skipped)
            raise CheckpointError(f"{self._folder.path}: every checkpoint is damaged:\n{told}")
        if step is not None:
            raise CheckpointError(f"{self._folder.path}: no checkpoint of step {step}")
        return 0

    def _restores(self, path: Path) -> bool:
        """Load a checkpoint, if it isn't damaged."""
        manifest, damage = self._verified(path)
        if manifest is None:
            _log.warning("the checkpoint %s is passed over: %s", path, damage)
            self.skipped.append((path, damage))
            return False
        self._load(path)
        self._saved_step = manifest.step
        _log.info("restored %s", path)
        return True

    def _restores_from_memory(self, held: Held) -> bool:
        """Load a step that the hosts have in memory, if it isn't damaged."""
        assert self._memory is not None
        path, step = self._memory.gathered(held), held.step
        manifest, damage = self._verified(path, is_own=True)
        if manifest is None:
            _log.warning("the copy of step %d in memory is passed over: %s", step, damage)
            return False
        self._load(path, place=f"memory of step {step}")
        _log.info("restored step %d from the memory of the hosts", step)
        return True

    def _verified(self, path: Path, is_own: bool = False) -> tuple[Manifest | None, str]:
        """The manifest of a checkpoint that isn't damaged, or what is; of several processes each
        reads a part of the files, unless the folder is its own."""
        manifest, damage = None, ""
        try:
            manifest = read_manifest(path)
            part = (0, 1) if is_own else (processes.index(), processes.count())
            verify(path, manifest, part=part)
        except CheckpointError as error:
            damage = str(error)
        found = agreement.texts_of_all(f"verifies the checkpoint {path.name}", damage)
        damage = next(filter(None, found), "")
        return (None if damage else manifest), damage

    def _load(self, path: Path, place: str | None = None) -> None:
        structure = read_saved(path, STRUCTURE)
        # There may have been fewer processes when it was saved.
        own = f"{RANDOM}.{processes.index()}"
        random = read_saved(path, own if own in names_in(path) else f"{RANDOM}.0")
        states, targets = self._states.targets(structure, described(path))
        load_state(path, targets, place)
        self._states.restore(states)
        set_random_state(random)

    @counters.timing("checkpoint")
    def save(self, step: int) -> None:
        """Save a checkpoint. With ``asynchronous`` its values are copied when this returns, and it
        is on the disk after `wait`.

        Args:
            step: how many steps have been done.

        Raises:
            UnsupportedOpError: a tensor has reductions pending.
            CheckpointError: this checkpoint, or the one before it, can't be written: the disk is
                full, the folder read-only, another run saves there, another process can't write
                its part. Earlier checkpoints stay.
            DivergenceError: another process does something else.
        """
        agreement.agree(f"saves a checkpoint of step {step}")
        self.wait()
        begin = time.monotonic()
        state, kinds = self._captured()
        if self._asynchronous:
            state = snapshot(state)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "xla_dtensor checkpoints")
            self._writing = self._thread.submit(self._write, step, state, kinds, begin)
        else:
            self._write(step, state, kinds, begin)
        self._saved_step, self._saved_at = step, time.monotonic()

    def _captured(self) -> tuple[dict[str, Any], dict[str, Kind]]:
        state, kinds = self._states.captured()
        random = io.BytesIO()
        torch.save(random_state(), random)
        state[RANDOM] = {str(processes.index()): random.getvalue()}
        return state, kinds

    @counters.timing("checkpoint")
    def _keep_in_memory(self, step: int) -> None:
        agreement.agree(f"keeps a copy of step {step} in memory")
        state, kinds = self._captured()
        together = Together(f"{self._number}/memory/{next(self._saves)}-{step}")
        assert self._memory is not None
        self._memory.keep(together, state, _manifest(step, kinds))
        self._kept_before.forget()  # all have come further than that
        self._kept_before = together

    @counters.timing("checkpoint writing")
    def _write(
        self, step: int, state: dict[str, Any], kinds: dict[str, Kind], begin: float
    ) -> None:
        together = Together(f"{self._number}/{next(self._saves)}-{step}")
        try:
            with together.telling():
                if together.first:
                    self._add(together, step, state, kinds)
                else:
                    self._add_own_part(together, state)
        except CheckpointError as error:
            raise CheckpointError(f"the checkpoint of step {step}: {error}") from error
        self._longest_save = max(self._longest_save, time.monotonic() - begin)
        self._before.forget()  # all have come further than that
        self._before = together

    def _add(
        self, together: Together, step: int, state: dict[str, Any], kinds: dict[str, Kind]
    ) -> None:
        with self._folder.adding(step) as path, together.telling():
            together.share("folder", path)
            manifest = _manifest(step, kinds)
            manifest.files = save_state(path, state, together)
            manifest.write(path)
        self._remove_old()
        together.share("added")

    @staticmethod
    def _add_own_part(together: Together, state: dict[str, Any]) -> None:
        path = together.share("folder")
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: process 0 has made this folder, and it isn't there; all processes need "
                "the same folder, on a file system that their hosts share"
            )
        save_state(path, state, together)
        together.share("added")

    def _remove_old(self) -> None:
        """The one just written is whole, so older ones may go. Damaged ones don't count."""
        if self._keep_last is None:
            return
        damaged = {path for path, _ in self.skipped}
        good = [(step, path) for step, path in self._folder.steps() if path not in damaged]
        for step, path in good[self._keep_last :]:
            if not self._keep_every or step % self._keep_every:
                self._folder.remove(path)

    @counters.timing("checkpoint")
    def wait(self) -> None:
        """Wait until what was saved is on the disk.

        Raises:
            CheckpointError: it can't be written.
        """
        if self._writing is None:
            return
        try:
            self._writing.result()
        finally:  # also Ctrl-C comes out of it
            if self._writing.done():
                self._writing = None

    def after_step(self, step: int) -> bool:
        """Save if it is time to.

        Args:
            step: how many steps have been done.

        Returns:
            whether to stop: a signal has come, or the deadline is near; a checkpoint of this step
            is on the disk then.

        Raises:
            CheckpointError: a checkpoint can't be written.
        """
        progress.step = step
        now = time.monotonic()
        self._longest_step = max(self._longest_step, now - self._step_at)
        self._step_at = now
        reason = self._stopping.reason
        # Another step, and this save, must still fit.
        if reason is None and self._stopping.comes_within(
            self._longest_step + 2 * self._longest_save
        ):
            reason = "deadline"
        due = self._every is not None and step % self._every == 0
        if self._every_seconds is not None and now - self._saved_at >= self._every_seconds:
            due = True
        due, reason = self._decisions.take(due, reason)
        if reason is not None:
            try:
                self.wait()
            except CheckpointError as error:  # there may not be another chance than this
                _log.error("the checkpoint before the last can't be written: %s", error)
                self._saved_step = None
        if (due or reason is not None) and step != self._saved_step:
            self.save(step)
            self._step_at = time.monotonic()
        elif self._memory is not None and step % (self._in_memory_every or 1) == 0:
            self._keep_in_memory(step)
            self._step_at = time.monotonic()
        if reason is not None:
            self.wait()
            self.stopped_by = progress.stopped_by = reason
        return reason is not None

    def close(self) -> None:
        """Wait until what was saved is on the disk, and let signals do what they did before.

        Raises:
            CheckpointError: it can't be written.
        """
        self._stopping.close()
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            self._folder.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _manifest(step: int, kinds: Mapping[str, Kind]) -> Manifest:
    about = {
        "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "torch": torch.__version__,
        "jax": jax.__version__,
    }
    return Manifest(
        step, tensors={name: text_of(kind) for name, kind in kinds.items()}, about=about
    )
