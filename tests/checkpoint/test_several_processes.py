"""Checkpoints of several processes."""

from __future__ import annotations

import itertools
import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import launch
from xla_dtensor.checkpoint.files.manifest import read_manifest, verify

PROGRAM = ["-m", "tests.checkpoint.programs.several"]
DEVICES = {count: {"JAX_NUM_CPU_DEVICES": str(8 // count)} for count in (1, 2, 4)}
HEARTBEAT = {"XLA_DTENSOR_HEARTBEAT_TIMEOUT": "8"}


def run(mode: str, folder: Path, count: int, seconds: float = 200, **more: str) -> Any:
    return launch.run([*PROGRAM, mode, str(folder)], count, seconds, DEVICES[count] | more)


def entries(folder: Path, count: int) -> list[list[dict[str, Any]]]:
    texts = [(folder / f"log{i}").read_text() for i in range(count)]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def steps(entries: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By step; of one that was done twice both are the same."""
    found: dict[int, dict[str, Any]] = {}
    for entry in entries:
        if "step" in entry:
            assert found.setdefault(entry["step"], entry) == entry
    return found


def losses(found: dict[int, dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([float.fromhex(found[step]["loss"]) for step in sorted(found)])


def uninterrupted(folder: Path, count: int, last: int) -> list[dict[str, Any]]:
    """The log of a run that nothing happens to."""
    (folder / "uninterrupted").mkdir()
    launch.succeeded(run("goes_on", folder / "uninterrupted", count, LAST=str(last)))
    return entries(folder / "uninterrupted", count)[0]


CHANGES = [(2, 1), (1, 2), (2, 2), (2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "counts",
    CHANGES,
    ids=lambda c: "-".join(map(str, c)),
)
def test_goes_on_in_another_number_of_processes(tmp_path: Path, counts: tuple[int, int]) -> None:
    """All state is there bit for bit; checkpoints are whole, and written by all processes."""
    expected = steps(uninterrupted(tmp_path, counts[0], 5))
    found: dict[int, dict[str, Any]] = {}
    for begin, count, last in zip((0, 2), counts, (3, 5), strict=True):
        in_a_thread = str(int(begin == 0))
        launch.succeeded(run("goes_on", tmp_path, count, LAST=str(last), ASYNCHRONOUS=in_a_thread))
        saved = sorted((tmp_path / "c").glob("step-*"))[-1]
        manifest = read_manifest(saved)
        verify(saved, manifest)
        writers = {name.split("_")[2] for name in manifest.files if name.startswith("__")}
        assert writers == set(map(str, range(count)))
        logs = entries(tmp_path, count)
        for i, log in enumerate(logs):
            assert log[0]["restored"] == begin
            assert not begin or log[0]["digest"] == expected[begin]["digest"]
            assert log[1:] == logs[0][1:]
            (tmp_path / f"log{i}").unlink()
        if count == counts[0]:
            assert steps(logs[0]).items() <= expected.items()
        found |= steps(logs[0])
    # XLA may add in another order where another number of processes adds.
    torch.testing.assert_close(losses(found), losses(expected))


SLOW = [
    pytest.param(m, marks=pytest.mark.slow) for m in ("one_cannot_write", "other_folders", "dcp")
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["own_random_state", *SLOW])
def test_in_two(tmp_path: Path, mode: str) -> None:
    results = run(mode, tmp_path, 2)
    assert all(text.rstrip().endswith("all of it") for text in launch.succeeded(results))
    if mode == "own_random_state":
        (first,), (second,) = entries(tmp_path, 2)
        assert first["drawn"] != second["drawn"]


@pytest.mark.slow
def test_a_signal_to_one_stops_all_after_the_same_step(tmp_path: Path) -> None:
    launch.succeeded(run("a_signal_to_one", tmp_path, 2))
    first, second = entries(tmp_path, 2)
    assert first == second and first[-1]["saved"] == [max(steps(first))]


@pytest.mark.slow
def test_either_is_killed_while_it_saves(tmp_path: Path) -> None:
    """Each life goes on bit for bit from what was saved last."""
    expected = steps(uninterrupted(tmp_path, 2, 24))
    draw = random.Random(11)
    for life in range(8):
        victim = life % 2
        kill = f"{victim} {draw.randrange(1, 3000)}"
        results = run("lives", tmp_path, 2, KILL=kill, **HEARTBEAT)
        assert results[victim].code == -signal.SIGKILL, results[victim].output
        assert results[1 - victim].code not in (0, -signal.SIGKILL), results[1 - victim].output
        assert f"process {victim} on" in results[1 - victim].output
    for log in entries(tmp_path, 2):
        restored = [entry["restored"] for entry in log if "restored" in entry]
        assert len(restored) == 8 and all(not e.get("skipped") for e in log)
        assert all(a < b for a, b in itertools.pairwise(restored))
        assert steps(log).items() <= expected.items()


@pytest.mark.slow
def test_safetensors(tmp_path: Path) -> None:
    """What two processes write is what one does."""
    (tmp_path / "1").mkdir()
    launch.succeeded(run("safetensors", tmp_path, 2))
    launch.succeeded(run("safetensors", tmp_path / "1", 1))
    files = [
        load_file(folder / "weights/model.safetensors") for folder in (tmp_path, tmp_path / "1")
    ]
    torch.testing.assert_close(files[0], files[1], rtol=0, atol=0)
    assert entries(tmp_path, 2)[0] == entries(tmp_path, 2)[1]
