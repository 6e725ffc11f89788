"""Where metrics go."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import xla_dtensor as xd


class Writer:
    """As TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.found.append((name, value, step))


class Run:
    """As a run of wandb."""

    def __init__(self) -> None:
        self.found: list[tuple[dict[str, float], int]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.found.append((values, step))


def test_each_kind(tmp_path: Path) -> None:
    writer, run, called = Writer(), Run(), Run()
    file = tmp_path / "new" / "run.jsonl"
    for where in (writer, run, called.log, file, str(file)):
        with xd.metrics.to(where, every=2) as metrics:
            for number in range(3):
                metrics.after_step(number, loss=number / 2)
    assert next((name, step) for name, _, step in writer.found) == ("loss", 1)
    assert [(values["loss"], step) for values, step in run.found] == [(0.5, 1), (1.0, 2)]
    assert [step for _, step in called.found] == [1, 2]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 1, 2]  # the second is added
    assert all(line["step/seconds"] >= 0 and line["memory/host_megabytes"] > 10 for line in lines)


def test_lines_are_json(tmp_path: Path) -> None:
    """Also of a training that diverged."""

    def no_number(name: str) -> None:
        raise AssertionError(name)

    file = tmp_path / "run.jsonl"
    with xd.metrics.to(file, every=1) as metrics:
        metrics.after_step(1, loss=float("nan"), norm=float("inf"), other=1.0)
    line = json.loads(file.read_text(), parse_constant=no_number)
    assert [line[name] for name in ("loss", "norm", "other")] == [None, None, 1.0]


def test_a_line_behind_a_torn_one(tmp_path: Path) -> None:
    """A run was killed in the middle of a write; the next one adds to its file."""
    file = tmp_path / "run.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    for _ in range(2):
        with xd.metrics.to(file, every=1) as metrics:
            metrics.after_step(3, loss=1.0)
    *_, torn, first, second = file.read_text().splitlines()
    assert torn == '{"step": 2, "lo'
    assert [json.loads(line)["step"] for line in (first, second)] == [3, 3]


def test_what_is_none_of_these() -> None:
    with pytest.raises(TypeError, match="add_scalar"):
        xd.metrics.to(3)
    with pytest.raises(TypeError, match=r"what xd\.compile has returned"):
        xd.metrics.to(print, step=lambda: None)
    for every in (0, 2.5):
        with pytest.raises(ValueError, match=f"every={every}.*whole number"):
            xd.metrics.to(print, every=every)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a folder; give a file's name, .*metrics\.jsonl"):
        xd.metrics.to(tmp_path)


def test_names_that_lines_have(tmp_path: Path) -> None:
    metrics = xd.metrics.to(tmp_path / "run.jsonl", every=1)
    with pytest.raises(ValueError, match=r"after_step\(time=...\): each line has a 'time'"):
        metrics.after_step(1, time=3.0)
    metrics.after_step(2, seconds=3.0)
    (line,) = (tmp_path / "run.jsonl").read_text().splitlines()
    assert json.loads(line)["seconds"] == 3


def test_a_full_disk_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = xd.metrics.to(tmp_path / "run.jsonl", every=1)
    (tmp_path / "run.jsonl").mkdir()  # can't be opened
    with caplog.at_level(logging.WARNING, "xla_dtensor.metrics"):
        for number in range(3):
            metrics.after_step(number)
    (record,) = caplog.records
    assert "can't be written" in record.message


def test_an_error_of_the_users_function_is_theirs() -> None:
    def fails(values: Any, step: int) -> None:
        raise OSError("no network")

    metrics = xd.metrics.to(fails, every=1)
    with pytest.raises(OSError, match="no network"):
        metrics.after_step(1)
