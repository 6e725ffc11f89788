"""Saved programs between processes: two that share the devices, one, and one that has waited."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import launch
from tests.runtime.programs.saved import STEPS

PROGRAM = ["-m", "tests.runtime.programs.saved"]


def said(output: str) -> tuple[list[str], str]:
    """The losses, and how many programs were compiled."""
    found = dict(line.split(" ", 1) for line in output.splitlines() if " " in line)
    losses = found["losses"].split()
    assert len(losses) == STEPS
    return losses, found["compilations"]


def alone(what: str, path: Path | str) -> list[launch.Result]:
    return launch.Processes([*PROGRAM, what, str(path)], [{}]).wait(120)


def two(what: str, path: Path | str) -> list[launch.Result]:
    return launch.run([*PROGRAM, what, str(path)], 2, 120)


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A file of one process, and its losses."""
    path = tmp_path_factory.mktemp("one") / "step.xla"
    (output,) = launch.succeeded(alone("save", path))
    losses, compilations = said(output)
    assert compilations == "1"
    return path, losses


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A file of two processes of four devices each, and their losses."""
    path = tmp_path_factory.mktemp("two") / "step.xla"
    outputs = launch.succeeded(two("save", path))
    losses, compilations = said(outputs[0])
    assert said(outputs[1]) == (losses, "1") and compilations == "1"
    names = {each.name for each in path.parent.iterdir()}
    assert names == {"step.xla", "step.xla0", "step.xla1"}  # of both; each one's own
    return path, losses


@pytest.mark.slow
def test_two_processes(of_two: tuple[Path, list[str]]) -> None:
    path, losses = of_two
    for output in launch.succeeded(two("load", path)):
        assert said(output) == (losses, "0")


@pytest.mark.slow
def test_as_many_processes_are_wanted(
    of_one: tuple[Path, list[str]], of_two: tuple[Path, list[str]]
) -> None:
    """JAX numbers the devices of several processes otherwise, and programs know numbers."""
    results = [*two("load", of_one[0]), *alone("load", of_two[0])]
    for result, device in zip(results, (4, 4, 2048), strict=True):
        assert result.code != 0
        words = f"of which JAX's device {device} isn't among the 8 of"
        assert words in result.output and "Compile it in as many processes" in result.output


@pytest.mark.slow
def test_processes_that_load_different_files(
    of_two: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """One would wait in a compilation, and one in its first step."""
    shutil.copy(of_two[0], tmp_path / "0")
    with zipfile.ZipFile(of_two[0]) as old, zipfile.ZipFile(tmp_path / "1", "w") as new:
        about = json.loads(old.read("about.json"))
        words = json.dumps({**about, "programs": about["programs"] * 2}).encode()
        new.writestr("about.json", words)
        new.writestr("about.sha256", hashlib.sha256(words).hexdigest())
        for number in range(2):
            new.writestr(f"{number}.bin", old.read("0.bin"))
    for result in two("load own", tmp_path):
        assert result.code != 0 and "All have to load the same file" in result.output
        for count in (1, 2):
            assert f"loads {count} compiled programs (digest " in result.output


@pytest.mark.slow
def test_devices_are_not_asked_for_before(of_one: tuple[Path, list[str]]) -> None:
    """Loading starts as many simulated devices as the program wants."""
    path, losses = of_one
    (output,) = launch.succeeded(alone("load first", path))
    assert said(output) == (losses, "0")


@pytest.mark.slow
def test_a_process_that_has_waited_for_it(of_one: tuple[Path, list[str]]) -> None:
    """A warm pool's: it has started the devices before it knows what to train."""
    path, losses = of_one
    process = subprocess.Popen(
        [sys.executable, *PROGRAM, "wait", "-"],
        cwd=launch.ROOT,
        env=launch.clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        _, output = process.communicate(f"{path}\n", timeout=120)
    finally:
        process.kill()
    assert said(output) == (losses, "0")
