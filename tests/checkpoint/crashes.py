"""A training run that ends itself with SIGKILL while it saves, again and again.

The parent has imported what takes long, and forks a process for each life of the run: XLA starts in
the child. A life restores, trains and saves after each step; at an instant that a seed says, in the
middle of a save, it kills itself. ``python -m tests.checkpoint.crashes FOLDER LIVES SEED``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any

STEPS_PER_LIFE = 1  # saves that are let through before the one that is killed
DEVICES = 4


def live(folder: Path, kill_at: int | None, last: int, every: int) -> None:
    """One life: until step ``last``, or until the process ends itself.

    Args:
        every: save after so many steps.
        kill_at: at which Python-level event (call or return, of Python or C) of the threads that
            save, counted from the first save that may be killed; None: live on.
    """
    import xla_dtensor as xd
    from tests.checkpoint.run import Run, manager_of

    run = Run(xd.init_device_mesh("xla", (2, 2), mesh_dim_names=("a", "b")))
    events = Events(kill_at)
    with manager_of(run, folder / "checkpoints", every=every, keep_last=2) as manager:
        begin = manager.restore()
        note(folder, {"restored": begin, "skipped": [why for _, why in manager.skipped]})
        events.watch(manager, begin)
        for step in range(begin, last):
            loss = run.step()
            note(folder, {"step": step + 1, "loss": loss.hex(), "digest": run.digest()})
            manager.after_step(step + 1)
        manager.wait()
    note(folder, {"events": events.longest})


class Events:
    """Counts the events of the saving thread, and ends the process at one of them."""

    def __init__(self, kill_at: int | None) -> None:
        self._kill_at = kill_at
        self._count = self.longest = 0
        self._armed = False

    def watch(self, manager: Any, begin: int) -> None:
        write = manager._write

        def watched(step: int, *args: Any) -> None:
            self._count, self._armed = 0, step - begin > STEPS_PER_LIFE
            sys.setprofile(self._see)
            try:
                write(step, *args)
            finally:
                sys.setprofile(None)
                self.longest = max(self.longest, self._count)
            if self._armed and self._kill_at is not None:  # a save of fewer events than others
                os.kill(os.getpid(), signal.SIGKILL)

        manager._write = watched

    def _see(self, frame: types.FrameType, event: str, arg: Any) -> None:
        self._count += 1
        if self._armed and self._count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def note(folder: Path, what: dict[str, Any]) -> None:
    """A line in the log, which one system call appends: no line is half there."""
    with (folder / "log").open("ab", buffering=0) as file:
        file.write(json.dumps(what).encode() + b"\n")


def forked(folder: Path, kill_at: int | None, last: int, every: int = 1) -> int:
    """The exit status of a life in a process of its own; of a signal its number, negative."""
    pid = os.fork()
    if pid == 0:
        try:
            live(folder, kill_at, last, every)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    timer = threading.Timer(60 + 2 * last, os.kill, (pid, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(pid, 0)
    timer.cancel()
    return os.waitstatus_to_exitcode(status)


def main(folder: Path, lives: int, seed: int) -> None:
    import tests.checkpoint.run  # noqa: F401
    import xla_dtensor.checkpoint  # noqa: F401  (once for all lives)

    draw = random.Random(seed)
    uninterrupted, killed = folder / "uninterrupted", folder / "killed"
    uninterrupted.mkdir()
    killed.mkdir()
    # Each life saves after the steps that are let through, and perhaps after one more.
    last = (STEPS_PER_LIFE + 1) * (lives + 1)
    assert forked(uninterrupted, None, last, every=last // 2) == 0
    lines = [json.loads(line) for line in (uninterrupted / "log").read_text().splitlines()]
    events = lines[-1]["events"]
    for _ in range(lives):
        status = forked(killed, draw.randrange(1, events), last)
        assert status == -signal.SIGKILL, f"a life ended with {status}"
    assert forked(killed, None, last) == 0
    print(f"{lives} kills among {events} events of a save")


if __name__ == "__main__":
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(DEVICES))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("NPROC", "64")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
