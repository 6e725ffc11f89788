"""Checkpoints of several processes; `main` says what each of them does.

``python -m tests.checkpoint.programs.several MODE FOLDER``, in one process or launched as several.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.checkpoint.crashes import Events
from tests.checkpoint.run import Run, manager_of
from xla_dtensor.checkpoint.files import writing
from xla_dtensor.errors import CheckpointError, DivergenceError
from xla_dtensor.runtime import processes

LAST = 6


def new_run(compiled: bool = True) -> Run:
    return Run(xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("a", "b")), compiled)


def note(folder: Path, what: dict[str, Any]) -> None:
    """A line in this process's log."""
    with (folder / f"log{processes.index()}").open("ab", buffering=0) as file:
        file.write(json.dumps(what).encode() + b"\n")


def train(folder: Path, run: Run, manager: Any, last: int = LAST) -> int:
    """Until ``last``, or until a step after which to stop; the number of steps done."""
    begin = manager.restore()
    skipped = [why for _, why in manager.skipped]
    note(folder, {"restored": begin, "skipped": skipped, "digest": run.digest() if begin else 0})
    for step in range(begin + 1, last + 1):
        loss = run.step()
        note(folder, {"step": step, "loss": loss.hex(), "digest": run.digest()})
        if manager.after_step(step):
            return step
    return last


def goes_on(folder: Path) -> None:
    """Save every second step, in a thread and at once in turns; leave one step unsaved."""
    run = new_run()
    asynchronous = bool(int(os.environ.get("ASYNCHRONOUS", "1")))
    with manager_of(run, folder / "c", every=2, keep_last=2, asynchronous=asynchronous) as manager:
        train(folder, run, manager, int(os.environ.get("LAST", LAST)))
    assert next(step for step, _ in manager.checkpoints()) % 2 == 0


def lives(folder: Path) -> None:
    """End one of the processes with SIGKILL in the middle of a save, as KILL="process event"."""
    victim, event = map(int, os.environ["KILL"].split())
    run = new_run()
    with manager_of(run, folder / "c", every=1, keep_last=2) as manager:
        events = Events(event if processes.index() == victim else None)
        begin = [step for step, _ in manager.checkpoints()]
        events.watch(manager, begin[0] if begin else 0)
        train(folder, run, manager, 100)


def a_signal_to_one(folder: Path) -> None:
    """Both stop after the same step, and have saved it."""
    run = new_run()
    with manager_of(run, folder / "c", every=100) as manager:
        if processes.index() == 1:
            step_of, count = run.step, [0]

            def step() -> float:
                count[0] += 1
                if count[0] == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                return step_of()

            run.step = step  # type: ignore[method-assign]
        assert train(folder, run, manager, 1000) in (3, 4)
        assert manager.stopped_by == "SIGTERM"
        note(folder, {"saved": [step for step, _ in manager.checkpoints()]})


def full(*args: Any) -> Any:
    raise CheckpointError("No space left on device")


def one_cannot_write(folder: Path) -> None:
    """A failure of either process is an error of both, and costs nothing that was there."""
    for victim in (0, 1):
        for asynchronous in (True, False):
            run = new_run(compiled=False)
            own = folder / f"{victim}{asynchronous}"
            with manager_of(run, own, asynchronous=asynchronous, keep_last=None) as manager:
                manager.save(1)
                manager.wait()
                with pytest.MonkeyPatch.context() as patch:
                    if processes.index() == victim:
                        patch.setattr(writing, "write_one_by_one", full)
                    with pytest.raises(CheckpointError, match="No space left") as caught:
                        manager.save(2)
                        manager.wait()
                if processes.index() != victim:
                    assert f"process {victim} on" in str(caught.value)
                manager.save(3)
                manager.wait()
                assert [step for step, _ in manager.checkpoints()] == [3, 1]
                assert not list(own.glob(".unfinished*")) + list(own.glob(".removed*"))
    only_one(folder)


def only_one(folder: Path) -> None:
    run = new_run(compiled=False)
    manager = manager_of(run, folder / "only")
    if processes.index() == 0:
        with pytest.raises(DivergenceError, match="saves a checkpoint of step 1"):
            manager.save(1)
    else:
        with pytest.raises(DivergenceError, match="saves a checkpoint of step 2"):
            manager.save(2)
    manager.close()


def other_folders(folder: Path) -> None:
    """Each process sees a folder of its own, as with disks that hosts don't share."""
    run = new_run(compiled=False)
    own = folder / str(processes.index())
    with manager_of(run, own, asynchronous=False) as manager:
        if processes.index():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Path, "is_dir", lambda self: False)
                with pytest.raises(CheckpointError, match="it isn't there; all processes need"):
                    manager.save(1)
            (own / "step-00000007").mkdir(parents=True)
        else:
            with pytest.raises(CheckpointError, match=r"process 1 on .* it isn't there"):
                manager.save(1)
        with pytest.raises(CheckpointError, match="isn't the same folder in all processes"):
            manager.restore()


def own_random_state(folder: Path) -> None:
    """Each process draws numbers of its own, and goes on with them."""
    run = new_run(compiled=False)
    random.seed(processes.index())
    torch.manual_seed(5)
    with manager_of(run, folder / "c", asynchronous=False) as manager:
        manager.save(1)
        expected = random.random()
        random.seed(77)
        assert manager.restore() == 1
        assert random.random() == expected
        note(folder, {"drawn": expected})


def safetensors(folder: Path) -> None:
    """The files of one process; and a failure of the one that writes is both's."""
    run = new_run(compiled=False)
    (path,) = xd.checkpoint.save_safetensors(run.model, folder / "weights")
    assert path == folder / "weights" / "model.safetensors"
    run.step()
    (folder / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        xd.checkpoint.save_safetensors(run.model, folder / "file" / "weights")
    more = xd.checkpoint.save_safetensors(run.model, folder / "more", max_shard_size=500)
    assert len(more) > 1
    before = run.digest()
    for parameter in run.model.parameters():
        parameter.data.zero_()
    assert run.digest() != before
    xd.checkpoint.load_safetensors(run.model, folder / "more")
    assert run.digest() == before
    note(folder, {"digest": before})


def dcp(folder: Path) -> None:
    """torch's own calls, without a group of torch's: sharded, at once and in a thread, into other
    layouts; and what only one of the processes can't write or read."""
    mesh = xd.init_device_mesh("xla", (2, 4))
    values = {"x": torch.arange(70.0).reshape(10, 7), "r": torch.arange(8.0)}
    placed = {"x": [Shard(0), Shard(1)], "r": [Replicate(), Replicate()]}
    others = {"x": [Shard(1), Replicate()], "r": [Shard(0), Shard(0)]}
    state: dict[str, Any] = {n: distribute_tensor(v, mesh, placed[n]) for n, v in values.items()}
    for turn in range(2):
        checkpoint.save(state | {"n": turn}, checkpoint_id=folder / "dcp")
        future: Any = checkpoint.async_save(state | {"n": 7}, checkpoint_id=folder / "async")
        loaded = {n: distribute_tensor(v * 0, mesh, others[n]) for n, v in values.items()}
        loaded["n"] = -1
        checkpoint.load(loaded, checkpoint_id=folder / "dcp")
        assert loaded["n"] == turn
        future.result()
        checkpoint.load(state | {"n": -1}, checkpoint_id=folder / "async")
        for name, value in values.items():
            assert torch.equal(loaded[name].full_tensor().cpu(), value)
            assert torch.equal(state[name].full_tensor().cpu(), value)
    assert len(list((folder / "dcp").glob("*.distcp"))) == 2
    with pytest.MonkeyPatch.context() as patch:
        if processes.index():
            patch.setattr(writing, "write_one_by_one", full)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.save(state, checkpoint_id=folder / "full")
    if processes.index():
        next((folder / "dcp").glob("__1*")).unlink()
    with pytest.raises(CheckpointError):
        checkpoint.load(loaded, checkpoint_id=folder / "dcp")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
    print("all of it")
