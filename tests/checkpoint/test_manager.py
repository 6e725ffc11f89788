"""`CheckpointManager`: what it saves, when, and what it finds again."""

from __future__ import annotations

import datetime
import errno
import json
import logging
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import xla_dtensor as xd
from tests.checkpoint.layouts import laid_out, same, value_of
from tests.checkpoint.run import Data, Run, manager_of
from tests.conftest import make_mesh
from xla_dtensor.checkpoint.files import streams

Manager = xd.checkpoint.CheckpointManager

VALUE = torch.arange(60, dtype=torch.float32).reshape(10, 6)


def simple(folder: Path, **kwargs: Any) -> tuple[Manager, dict[str, Any]]:
    """A manager of a dict with a sharded tensor and a number."""
    state = {"w": laid_out(VALUE, "both"), "n": 1}
    return Manager(folder, {"state": state}, **kwargs), state


# --- a run goes on as if nothing had happened ----------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted() -> list[Any]:
    run = Run(make_mesh("2x4"))
    return [(run.step(), run.digest()) for _ in range(6)]


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_restored_run_is_the_uninterrupted_one(
    tmp_path: Path, uninterrupted: list[Any], asynchronous: bool
) -> None:
    first = Run(make_mesh("2x4"))
    with manager_of(first, tmp_path, every=2, asynchronous=asynchronous) as manager:
        for step in range(manager.restore(), 5):
            assert (first.step(), first.digest()) == uninterrupted[step]
            assert not manager.after_step(step + 1)
    again = Run(make_mesh("2x4"))
    with manager_of(again, tmp_path) as manager:
        begin = manager.restore()
        assert begin == 4 and manager.skipped == []
        assert again.digest() == uninterrupted[3][1]
        assert again.log["losses"] == [loss for loss, _ in uninterrupted[:4]]
        for step in range(begin, 6):
            assert (again.step(), again.digest()) == uninterrupted[step]


def test_restoring_in_the_middle_of_a_run(tmp_path: Path, uninterrupted: list[Any]) -> None:
    """Back to an earlier step, with a program that has run and an optimizer that has a state."""
    run = Run(make_mesh("2x4"))
    with manager_of(run, tmp_path, keep_last=None) as manager:
        for step in range(5):
            manager.save(step)
            run.step()
        for step in (3, 1):
            assert manager.restore(step) == step
            assert run.digest() == uninterrupted[step - 1][1]
            assert (run.step(), run.digest()) == uninterrupted[step]
        with pytest.raises(xd.CheckpointError, match="no checkpoint of step 9"):
            manager.restore(9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh", ["8", "5"])
def test_onto_another_mesh(tmp_path: Path, mesh: str) -> None:
    """Every value is the one that was saved, on a mesh of other devices."""
    first, again = Run(make_mesh("2x4")), Run(make_mesh(mesh))
    first.step()
    with manager_of(first, tmp_path) as manager:
        manager.save(1)
    with manager_of(again, tmp_path) as manager:
        assert manager.restore() == 1
    assert again.digest() == first.digest()
    assert next(again.model.parameters()).device_mesh.size() == int(mesh)
    again.step()


def test_saving_before_the_first_step_changes_nothing(
    tmp_path: Path, uninterrupted: list[Any]
) -> None:
    """torch's helper would take a step to make the optimizer's state."""
    run = Run(make_mesh("2x4"))
    with manager_of(run, tmp_path) as manager:
        manager.save(0)
    assert not run.optimizer.state
    assert (run.step(), run.digest()) == uninterrupted[0]
    again = Run(make_mesh("2x4"))
    with manager_of(again, tmp_path) as manager:
        assert manager.restore() == 0 and not again.optimizer.state
    assert (again.step(), again.digest()) == uninterrupted[0]


def test_training_goes_on_while_it_is_written(tmp_path: Path, uninterrupted: list[Any]) -> None:
    """The copy is of the step that was saved, though steps donate and the schedule goes on."""
    run = Run(make_mesh("2x4"))
    gate = threading.Event()
    with manager_of(run, tmp_path) as manager, pytest.MonkeyPatch.context() as patch:
        original = manager._write

        def late(*args: Any) -> None:
            gate.wait(60)
            original(*args)

        patch.setattr(manager, "_write", late)
        run.step()
        manager.save(1)
        for step in range(1, 4):
            assert (run.step(), run.digest()) == uninterrupted[step]
        gate.set()
    again = Run(make_mesh("2x4"))
    with manager_of(again, tmp_path) as manager:
        assert manager.restore() == 1 and again.digest() == uninterrupted[0][1]


def test_a_save_waits_for_the_one_before_it(tmp_path: Path, monkeypatch: Any) -> None:
    manager, state = simple(tmp_path)
    order: list[str] = []
    original = manager._write

    def slow(step: int, *args: Any) -> None:
        order.append(f"begin {step}")
        time.sleep(0.2)
        original(step, *args)
        order.append(f"end {step}")

    monkeypatch.setattr(manager, "_write", slow)
    for step in range(1, 4):
        state["n"] = step
        manager.save(step)
        order.append(f"saved {step}")
    manager.close()
    assert order.index("end 1") < order.index("saved 2") < order.index("end 2")
    assert order.index("end 2") < order.index("saved 3")


# --- what can be saved ---------------------------------------------------------------------------


def test_state_of_all_kinds(tmp_path: Path) -> None:
    mesh = make_mesh("8")

    class Thing:
        def __init__(self, n: int) -> None:
            self.state: Any = {
                "plain": torch.full((3,), float(n)),
                "xla": torch.full((3,), float(n), device="xla"),
                "each": xd.from_device_values(
                    [torch.full((2,), i + 1.0 * n) for i in range(8)], mesh
                ),
                "tuple": (n, torch.tensor(n), [torch.tensor(n + 1)]),
                3: {"a": None, "b": [1.5, "x", b"y", True]},
                "empty": [[], {}, ()],
            }

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    generator = torch.Generator().manual_seed(4)
    counts = {"steps": 3, "best": 0.5}
    saved = Thing(5)
    with Manager(tmp_path, {"t": saved, "g": generator, "c": counts}) as manager:
        manager.save(1)
        expected = torch.rand(3, generator=generator)
        counts["steps"], loaded = 9, Thing(0)
    with Manager(tmp_path, {"t": loaded, "g": generator, "c": counts}) as manager:
        manager.restore()
    assert torch.equal(torch.rand(3, generator=generator), expected)
    assert counts == {"steps": 3, "best": 0.5}
    state = loaded.state
    assert state["plain"].tolist() == [5] * 3 and state["plain"].device.type == "cpu"
    assert state["xla"].tolist() == [5] * 3 and state["xla"].device.type == "xla"
    assert [v.tolist() for v in state["each"].local_values()] == [[i + 5.0] * 2 for i in range(8)]
    assert state["tuple"] == (5, torch.tensor(5), [torch.tensor(6)])
    assert state[3] == {"a": None, "b": [1.5, "x", b"y", True]} and state["empty"] == [[], {}, ()]


@pytest.mark.parametrize("trained", [0, 2])
def test_optimizers_of_any_state(tmp_path: Path, trained: int) -> None:
    """State of other shapes than the parameters', some without, groups, several optimizers."""

    def build(seed: int) -> tuple[dict[str, Any], Any]:
        torch.manual_seed(seed)
        parts = {"a": nn.Linear(4, 6), "b": nn.Linear(6, 2), "unused": nn.Linear(2, 2)}
        model = nn.ModuleDict(parts).to("xla")
        for part in parts.values():
            xd.fully_shard(part, mesh=make_mesh("8"))
        sgd = torch.optim.SGD(model["a"].parameters(), lr=0.1, momentum=0.9)
        groups = [
            {"params": [model["b"].weight], "lr": 0.3},
            {"params": [model["b"].bias, *model["unused"].parameters()]},
        ]
        adam = torch.optim.Adam(groups, lr=0.1)
        factors = torch.optim.Adafactor([model["b"].weight], lr=1e-9)
        objects = {"model": model, "sgd": sgd, "adam": adam, "factors": factors}

        def step() -> None:
            x = torch.linspace(-1, 1, 12).reshape(3, 4).to("xla")
            model["b"](model["a"](x)).square().mean().backward()
            for optimizer in (sgd, adam, factors):
                optimizer.step()
            model.zero_grad()

        return objects, step

    def digest(objects: dict[str, Any]) -> dict[str, torch.Tensor]:
        found = {f"model.{k}": value_of(v) for k, v in objects["model"].state_dict().items()}
        for name in ("sgd", "adam", "factors"):
            for i, state in objects[name].state_dict()["state"].items():
                for key, value in state.items():
                    if value is not None:
                        found[f"{name}.{i}.{key}"] = value_of(torch.as_tensor(value))
        return found

    objects, step = build(1)
    for _ in range(trained):
        step()
    with Manager(tmp_path, objects) as manager:
        manager.save(trained)
    other, other_step = build(2)
    with Manager(tmp_path, other) as manager:
        manager.restore()
    for _ in range(2):
        expected, found = digest(objects), digest(other)
        assert expected.keys() == found.keys()
        assert all(same(found[k], v) for k, v in expected.items())
        step()
        other_step()
    assert [g["lr"] for g in other["adam"].param_groups] == [0.3, 0.1]


def test_dtypes_of_optimizer_state_stay(tmp_path: Path) -> None:
    """torch's ``load_state_dict`` would cast them to the parameters'."""
    p = nn.Parameter(laid_out(VALUE.bfloat16(), "both"))
    optimizer = torch.optim.SGD([p], momentum=0.9)
    optimizer.state[p]["momentum_buffer"] = laid_out(VALUE / 7, "both")
    with Manager(tmp_path, {"optimizer": optimizer}) as manager:
        manager.save(1)
        optimizer.state.clear()
        manager.restore()
    assert same(value_of(optimizer.state[p]["momentum_buffer"]), VALUE / 7)


def test_extra_state_and_hooks_of_modules(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.n, self.doubled = n, torch.full((2,), float(n))

        def get_extra_state(self) -> Any:
            return {"n": self.n, "history": torch.tensor([self.n])}

        def set_extra_state(self, state: Any) -> None:
            self.n = state["n"] + int(state["history"])

    with Manager(tmp_path, {"m": nn.ModuleList([Own(3), nn.Linear(2, 2)])}) as manager:
        manager.save(1)
    other = nn.ModuleList([Own(0), nn.Linear(2, 2)])
    with Manager(tmp_path, {"m": other}) as manager:
        manager.restore()
    assert other[0].n == 6


def test_torch_loads_what_the_manager_saves(tmp_path: Path) -> None:
    """With its own helpers, into a plain model."""
    run = Run(make_mesh("2x4"))
    run.step()
    with manager_of(run, tmp_path) as manager:
        manager.save(1)
        manager.wait()
        ((_, path),) = manager.checkpoints()
    plain = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(plain.parameters())
    state: Any = {"model": plain.state_dict()}
    _, optimizer_state = dcp.state_dict.get_state_dict(plain, optimizer)
    state["optimizer"] = optimizer_state
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=path)
    dcp.state_dict.set_optimizer_state_dict(plain, optimizer, state["optimizer"])
    for name, value in run.model.state_dict().items():
        assert same(plain.state_dict()[name], value_of(value))
    for p, q in zip(run.model.parameters(), plain.parameters(), strict=True):
        for key, value in run.optimizer.state[p].items():
            assert same(optimizer.state[q][key], value_of(value)), key
    assert optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]


def test_the_default_group_of_all_devices(tmp_path: Path) -> None:
    """``init_process_group("xla")`` makes no other processes."""
    manager, state = simple(tmp_path)
    torch.distributed.init_process_group("xla")
    try:
        manager.save(1)
        state["n"] = 5
        assert manager.restore() == 1 and state["n"] == 1
    finally:
        torch.distributed.destroy_process_group()
        manager.close()


# --- when it saves, and what it keeps ------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({"keep_last": 2}, [9, 10]),
        ({"keep_last": 1}, [10]),
        ({"keep_last": 2, "keep_every": 4}, [0, 4, 8, 9, 10]),
        ({"keep_last": None}, list(range(11))),
    ],
)
def test_which_are_kept(tmp_path: Path, keep: dict[str, Any], left: list[int]) -> None:
    data = Data()
    with Manager(tmp_path, {"data": data}, **keep) as manager:
        for step in range(11):
            manager.save(step)
        manager.wait()
        assert [step for step, _ in manager.checkpoints()] == left[::-1]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".lock",
        *(f"step-{step:08d}" for step in left),
    ]


def test_every_so_many_steps_and_seconds(tmp_path: Path) -> None:
    with Manager(tmp_path, {"data": Data()}, every=3, keep_last=None) as manager:
        for step in range(1, 8):
            manager.after_step(step)
        manager.wait()
        assert [step for step, _ in manager.checkpoints()] == [6, 3]
    with Manager(tmp_path, {"data": Data()}, every_seconds=0.3, keep_last=None) as manager:
        for step in range(10, 16):
            time.sleep(0.1)
            manager.after_step(step)
        manager.wait()
        assert len(manager.checkpoints()) in (3, 4)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_signal_saves_and_stops(tmp_path: Path, asynchronous: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Manager(tmp_path, {"data": Data()}, every=100, asynchronous=asynchronous) as manager:
        assert not manager.after_step(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.after_step(2) and manager.stopped_by == "SIGTERM"
        assert [step for step, _ in manager.checkpoints()] == [2]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_does_what_it_did_before(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, _: seen.append(signum))
    try:
        with Manager(tmp_path, {"data": Data()}, signals=[signal.SIGUSR1]) as manager:
            torch.ones(2, device="xla")  # puts our handler around the manager's
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not seen
            os.kill(os.getpid(), signal.SIGUSR1)
            assert seen == [signal.SIGUSR1] and manager.after_step(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("as_time", [False, True])
def test_a_deadline(tmp_path: Path, as_time: bool) -> None:
    deadline: Any = 0.5
    if as_time:
        deadline = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.5)
    begin = time.monotonic()
    with Manager(tmp_path, {"data": Data()}, deadline=deadline) as manager:
        step = 0
        stopped = False
        while not stopped:
            time.sleep(0.1)
            step += 1
            stopped = manager.after_step(step)
        assert time.monotonic() - begin < 0.5 and step >= 2
        assert manager.stopped_by == "deadline"
        assert [s for s, _ in manager.checkpoints()] == [step]


# --- damage --------------------------------------------------------------------------------------


def bit_flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "a bit of the shards": ("__0_0.distcp", bit_flipped),
    "the shards cut off": ("__0_0.distcp", lambda p: p.write_bytes(p.read_bytes()[:-1])),
    "no shards": ("__0_0.distcp", Path.unlink),
    "empty shards": ("__0_0.distcp", lambda p: p.write_bytes(b"")),
    "a bit of the metadata": (".metadata", bit_flipped),
    "no metadata": (".metadata", Path.unlink),
    "a bit of the manifest": ("manifest.json", bit_flipped),
    "no manifest": ("manifest.json", Path.unlink),
    "half a manifest": ("manifest.json", lambda p: p.write_bytes(p.read_bytes()[:100])),
    "an empty manifest": ("manifest.json", lambda p: p.write_text("{}")),
    "a manifest of a list": ("manifest.json", lambda p: p.write_text("[1]")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_ones_are_passed_over_by_name(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager, state = simple(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        state["n"] = step
        manager.save(step)
    manager.close()
    newest = tmp_path / "step-00000003"
    name, spoil = DAMAGE[damage]
    spoil(newest / name)
    manager, state = simple(tmp_path, keep_last=2)
    with caplog.at_level(logging.WARNING, "xla_dtensor.checkpoint"):
        assert manager.restore() == 2 and state["n"] == 2
    ((path, why),) = manager.skipped
    assert path == newest and str(newest / name) in why and why in caplog.text
    # The run goes on, and what was damaged doesn't push out what is good.
    for step in (3, 4):
        state["n"] = step
        manager.save(step)
        manager.wait()
        steps = [p.name for _, p in manager.checkpoints()]
        assert newest.name in steps
        kept = [n for n in steps if n != newest.name]
        assert len(kept) == 2 and kept[0] in ("step-00000003.1", "step-00000004")
    manager.close()
    other, state = simple(tmp_path)
    assert other.restore() == 4 and state["n"] == 4
    other.close()


def test_all_damaged_is_an_error_that_names_them(tmp_path: Path) -> None:
    manager, state = simple(tmp_path)
    for step in (1, 2):
        manager.save(step)
    manager.wait()
    for path in tmp_path.glob("step-*"):
        bit_flipped(path / "__0_0.distcp")
    state["n"] = 77
    with pytest.raises(xd.CheckpointError, match="every checkpoint is damaged") as error:
        manager.restore()
    assert "step-00000001" in str(error.value) and "step-00000002" in str(error.value)
    assert state["n"] == 77 and same(value_of(state["w"]), VALUE)
    manager.close()


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    manager, _ = simple(tmp_path)
    manager.save(1)
    manager.close()
    (tmp_path / ".unfinished-00000002-abc").mkdir()
    (tmp_path / ".removed-step-00000000-abc").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-7").mkdir()  # not by us
    manager, _ = simple(tmp_path)
    assert manager.restore() == 1
    manager.save(2)
    manager.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".lock", "notes.txt", "step-7", "step-00000001", "step-00000002"}


# --- what goes wrong while it is saved -----------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["asynchronous", "at once"])
def asynchronous(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield request.param


def failing_save(manager: Manager, step: int) -> pytest.ExceptionInfo[xd.CheckpointError]:
    with pytest.raises(xd.CheckpointError) as error:
        manager.save(step)
        manager.wait()
    return error


@pytest.mark.parametrize("after", [0, 1000, 2000])
def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, after: int
) -> None:
    manager, state = simple(tmp_path, asynchronous=asynchronous)
    manager.save(1)
    manager.wait()
    original, room = streams.FileStream.__init__, [after]

    class Disk:
        """Writes what there is room for, as a file does, and then nothing more."""

        def __init__(self, raw: Any) -> None:
            self._raw = raw

        def __getattr__(self, name: str) -> Any:
            return getattr(self._raw, name)

        def write(self, data: Any) -> int:
            if room[0] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = self._raw.write(data[: room[0]])
            room[0] -= written
            return written

    monkeypatch.setattr(streams.FileStream, "__init__", lambda self, raw: original(self, Disk(raw)))
    assert_told_of_a_full_disk(failing_save(manager, 2))
    monkeypatch.undo()
    assert_only_the_first_is_there(tmp_path, manager, state)
    manager.save(2)  # there is room again
    manager.close()
    assert [step for step, _ in manager.checkpoints()] == [2, 1]


def assert_only_the_first_is_there(folder: Path, manager: Manager, state: dict[str, Any]) -> None:
    """And nothing of a second checkpoint, which couldn't be written."""
    assert [p.name for p in folder.iterdir() if p.name.startswith(".unf")] == []
    state["n"] = 9
    assert manager.restore() == 1 and state["n"] == 1


def assert_told_of_a_full_disk(error: pytest.ExceptionInfo[xd.CheckpointError]) -> None:
    text = str(error.value)
    assert text.startswith("the checkpoint of step 2: ")
    assert f"No space left on device (process 0 on {platform.node()}, where " in text
    assert re.search(r"\d+ bytes are free", text)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is full is Linux's")
def test_a_disk_that_has_no_room_for_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    manager, state = simple(tmp_path, asynchronous=asynchronous)
    manager.save(1)
    manager.wait()
    original = Path.open

    def full(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        is_manifest = self.name == "manifest.json" and "w" in mode
        return original(Path("/dev/full") if is_manifest else self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    error = failing_save(manager, 2)
    monkeypatch.undo()
    assert_told_of_a_full_disk(error)
    assert "manifest.json" in str(error.value)
    assert_only_the_first_is_there(tmp_path, manager, state)
    manager.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only folders")
def test_a_read_only_folder(tmp_path: Path, asynchronous: bool) -> None:
    manager, _ = simple(tmp_path, asynchronous=asynchronous)
    manager.save(1)
    manager.close()
    tmp_path.chmod(0o500)
    try:
        manager, _ = simple(tmp_path, asynchronous=asynchronous)
        assert manager.restore() == 1  # reading needs no writing
        assert str(tmp_path) in str(failing_save(manager, 2).value)
    finally:
        tmp_path.chmod(0o700)
        manager.close()


def test_a_read_only_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    manager, state = simple(tmp_path, asynchronous=asynchronous)
    manager.save(1)
    manager.wait()

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        if not self.exists():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    state["n"] = 5
    error = failing_save(manager, 2)
    assert str(tmp_path) in str(error.value) and "Read-only" in str(error.value)
    assert manager.restore() == 1 and state["n"] == 1
    manager.close()


def test_a_folder_that_can_not_be_made(tmp_path: Path, asynchronous: bool) -> None:
    (tmp_path / "file").write_text("")
    manager, _ = simple(tmp_path / "file" / "folder", asynchronous=asynchronous)
    assert manager.restore() == 0
    assert str(tmp_path / "file") in str(failing_save(manager, 1).value)
    manager.close()


def test_two_runs_in_one_folder(tmp_path: Path, asynchronous: bool) -> None:
    one, _ = simple(tmp_path, asynchronous=asynchronous)
    other, _ = simple(tmp_path, asynchronous=asynchronous)
    one.save(1)
    one.wait()
    error = failing_save(other, 2)
    assert f"process {os.getpid()}" in str(error.value) and "folder of its own" in str(error.value)
    one.close()
    other.save(2)
    other.close()


def test_a_failed_write_does_not_keep_the_last_chance(tmp_path: Path) -> None:
    manager, _ = simple(tmp_path)
    blocker = tmp_path / ".lock"
    blocker.mkdir()
    manager.save(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    blocker.rmdir()
    assert manager.after_step(2)
    manager.close()
    assert [step for step, _ in manager.checkpoints()] == [2]


def test_an_interrupt_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is Ctrl-C, and nothing half written is left."""
    manager, _ = simple(tmp_path, asynchronous=False)

    def write(self: Any, data: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(streams.FileStream, "write", write)
    with pytest.raises(KeyboardInterrupt):
        manager.save(1)
    manager.close()
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


# --- what is refused -----------------------------------------------------------------------------


def test_objects_without_a_state(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="checkpoint of 'n', a int"):
        Manager(tmp_path, {"n": 3})
    for name in ("a.b", "random", "xla_dtensor", ""):
        with pytest.raises(ValueError, match="name"):
            Manager(tmp_path, {name: {}})
    for kwargs in ({"every": 0}, {"keep_last": 0}, {"keep_every": -1}):
        with pytest.raises(ValueError, match="1 or more"):
            Manager(tmp_path, {}, **kwargs)


def test_state_that_is_no_plain_data_is_refused_when_saved(tmp_path: Path) -> None:
    manager = Manager(tmp_path, {"ok": {}, "bad": {"path": Path("a")}})
    with pytest.raises(xd.CheckpointError, match="the state of 'bad' has what is neither"):
        manager.save(1)
    manager.close()


def test_another_model_is_told_from_damage(tmp_path: Path) -> None:
    with Manager(tmp_path, {"model": nn.Linear(2, 2), "data": Data()}) as manager:
        manager.save(1)
    for objects, told in [
        ({"model": nn.Linear(2, 2, bias=False)}, r"only there \['bias'\]"),
        ({"model": nn.Sequential(nn.Linear(2, 2))}, "not in the checkpoint"),
        ({"model": nn.Linear(3, 2)}, r"'model.weight' is of size \[2, 3\], and of \[2, 2\] in"),
        ({"other": nn.Linear(2, 2)}, "has no 'other'; it has 'model', 'data'"),
    ]:
        with Manager(tmp_path, objects) as manager, pytest.raises(xd.CheckpointError, match=told):
            manager.restore()
        assert manager.skipped == []


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    manager, _ = simple(tmp_path)
    manager.save(12)
    manager.close()
    manifest = json.loads((tmp_path / "step-00000012" / "manifest.json").read_text())
    assert manifest["step"] == 12
    assert manifest["tensors"] == {"state.w": "[Shard(0), Shard(1)] on 2x4"}
    assert set(manifest["files"]) == {"__0_0.distcp", ".metadata"}
    assert manifest["about"]["torch"] == torch.__version__
