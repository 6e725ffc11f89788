"""Copies of a run's state in the memory of its hosts, of which some are lost between two starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import launch
from xla_dtensor.checkpoint import memory

pytestmark = pytest.mark.slow  # each start takes ten seconds

STEPS = 6  # the newest on the disk is that of step 4


class Hosts:
    """Hosts of one process each; a host's memory is a folder.

    Args:
        folder: for all.
        names: of the hosts.
    """

    def __init__(self, folder: Path, names: str) -> None:
        self.folder, self.names = folder, [*names]

    def memory(self, name: str) -> Path:
        return self.folder / f"memory of {name}"

    def start(self, begin: int | str, end: int) -> None:
        """Train from one step to another."""
        count, port = len(self.names), launch.free_port()
        command = ["-m", "tests.checkpoint.programs.in_memory", str(self.folder / "disk")]
        environments = [
            launch.torchrun_variables(rank, count, port)
            | {
                memory.FOLDER: str(self.memory(name)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "JAX_NUM_CPU_DEVICES": "2",
                "JAX_PLATFORMS": "cpu",
                "NPROC": "16",
                "XLA_DTENSOR_START_TIMEOUT": "120",
            }
            for rank, name in enumerate(self.names)
        ]
        processes = launch.Processes([*command, str(begin), str(end)], environments)
        outputs = launch.succeeded(processes.wait(300))
        began = 0 if begin == "nothing" else begin
        assert all(f"began after {began}" in text for text in outputs)

    def lose(self, name: str) -> None:
        self.names.remove(name)
        shutil.rmtree(self.memory(name))

    def kept(self, name: str) -> list[Path]:
        return sorted(self.memory(name).glob("memory/*/0/step-*"))


@pytest.mark.parametrize("lost", ["", "a", "c", "ac"])
def test_what_is_left_is_enough(tmp_path: Path, lost: str) -> None:
    """Also for another number of processes; and that goes on, and loses one again."""
    hosts = Hosts(tmp_path, "abcd")
    hosts.start("nothing", STEPS)
    for name in lost:
        hosts.lose(name)
    hosts.start(STEPS, STEPS + 1)
    hosts.lose("b")
    hosts.names += [*lost, "e"]  # new ones, with nothing
    hosts.start(STEPS + 1, STEPS + 2)


def test_two_neighbours_are_too_many(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "abcd")
    hosts.start("nothing", STEPS)
    hosts.lose("b")
    hosts.lose("c")
    hosts.start(4, 5)  # from the disk
    assert [path.name for path in hosts.kept("a")] == ["step-00000005"]  # what was later is gone
    hosts.start(5, 6)


def test_some_were_killed_before_they_had_the_newest(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "abc")
    hosts.start("nothing", STEPS)
    for name in "ab":
        shutil.rmtree(hosts.kept(name)[-1])
    (hosts.kept("a")[0].parent / "unfinished").mkdir()
    hosts.start(STEPS - 1, STEPS)


def test_the_disks_newest_is_damaged(tmp_path: Path) -> None:
    """What is in memory is older, and newer than the rest."""
    hosts = Hosts(tmp_path, "ab")
    hosts.start("nothing", 8)
    (tmp_path / "disk/step-00000008/manifest.json").unlink()
    hosts.start(7, 8)


@pytest.mark.parametrize("damaged", [1, 2])
def test_damage_is_found(tmp_path: Path, damaged: int) -> None:
    """What comes next is the step before, in memory, and then the disk's."""
    hosts = Hosts(tmp_path, "ab")
    hosts.start("nothing", STEPS)
    for name in "ab":
        for kept in hosts.kept(name)[-damaged:]:
            for path in kept.glob("*.distcp"):
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 1
                path.write_bytes(content)
    hosts.start(STEPS - 1 if damaged == 1 else 4, STEPS)
    assert [int(path.name[-1]) for path in hosts.kept("a")] == [STEPS - 1, STEPS]


def test_a_host_has_no_room(tmp_path: Path) -> None:
    """All go on from the disk, and none waits for another."""
    hosts = Hosts(tmp_path, "ab")
    hosts.start("nothing", STEPS)
    hosts.names += ["c"]
    for kept in hosts.kept("a"):
        inside = kept.relative_to(hosts.memory("a"))
        for path in kept.glob("*.distcp"):  # a folder of that name: the file can't be written
            (hosts.memory("c") / inside / path.name).mkdir(parents=True)
    hosts.start(4, 5)


def test_a_run_that_nobody_starts_again_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(memory.FOLDER, raising=False)
    assert memory.of_this_process(Path("run")) is None
