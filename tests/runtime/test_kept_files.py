"""Files by name that processes share hold, or aren't there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xla_dtensor.runtime.kept.files import KeptFiles

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def files(tmp_path: Path) -> KeptFiles:
    return KeptFiles(tmp_path / "of" / "ours", ".gz", 2**20)


def test_written_and_read(files: KeptFiles, tmp_path: Path) -> None:
    assert not files.has("a") and files.read("a") is None
    files.write("a", CONTENT)
    files.write("b", b"")
    assert files.has("a") and files.read("a") == CONTENT and files.read("b") == b""
    files.write("a", b"another")
    assert KeptFiles(tmp_path / "of" / "ours", ".gz", 1).read("a") == b"another"


@pytest.mark.parametrize("kept", [0, 1, 20, -9, -1])
def test_half_a_file_is_none(files: KeptFiles, tmp_path: Path, kept: int) -> None:
    files.write("a", CONTENT)
    (file,) = (tmp_path / "of" / "ours").iterdir()
    file.write_bytes(file.read_bytes()[:kept])
    assert files.has("a") and files.read("a") is None
    files.write("a", CONTENT)
    assert files.read("a") == CONTENT


@pytest.mark.parametrize("at", [12, 40, -6])
def test_a_changed_byte_is_found(files: KeptFiles, tmp_path: Path, at: int) -> None:
    files.write("a", CONTENT)
    (file,) = (tmp_path / "of" / "ours").iterdir()
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    assert files.read("a") != CONTENT


def test_a_folder_that_can_only_be_read(files: KeptFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write("a", CONTENT)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("read only")

    for owner, name in ((os, "utime"), (Path, "write_bytes"), (Path, "unlink"), (Path, "mkdir")):
        monkeypatch.setattr(owner, name, refuse)
    files.write("b", CONTENT)
    assert files.read("a") == CONTENT and files.read("b") is None


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    files = KeptFiles(tmp_path / "taken", ".gz", 2**20)
    files.write("a", CONTENT)
    assert files.read("a") is None


def test_the_longest_unused_go(tmp_path: Path) -> None:
    folder = tmp_path / "few"
    many = KeptFiles(folder, ".gz", 2**20)
    for age, name in enumerate("abc"):
        many.write(name, CONTENT)
        os.utime(folder / f"{name}.gz", (age, age))
    left = folder / "x.gz.1-1"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    size = (folder / "a.gz").stat().st_size
    few = KeptFiles(folder, ".gz", 2.5 * size)
    few.read("a")
    few.write("d", CONTENT)
    assert {path.name for path in folder.iterdir()} == {"a.gz", "d.gz"}


_WRITES = """
import sys
from pathlib import Path
from xla_dtensor.runtime.kept.files import KeptFiles
files = KeptFiles(Path(sys.argv[1]), ".gz", 2**20)
for _ in range(200):
    files.write("a", sys.argv[2].encode() * 5000)
"""


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    begin = lambda letter: subprocess.Popen([sys.executable, "-c", _WRITES, str(tmp_path), letter])
    writers = [begin("x"), begin("y")]
    files, seen = KeptFiles(tmp_path, ".gz", 2**20), set()
    while any(writer.poll() is None for writer in writers):
        seen.add(files.read("a"))
    assert all(writer.returncode == 0 for writer in writers)
    assert seen - {None} <= {b"x" * 5000, b"y" * 5000} and files.read("a")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gz"]
