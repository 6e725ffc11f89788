"""The scenarios and random programs on an xla mesh over several processes, started by torchrun:
equal on every device to torch's with one process per device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.launch import clean_environment
from tests.oracle import fuzz
from tests.oracle._entries import Dump, compare
from tests.oracle._harness import scenario, scenario_names
from tests.oracle.test_oracle import Launches, launched, torchrun  # noqa: F401  (the fixture)

FAST = ("collective_all_reduce", "fsdp_tp")
FUZZ_SEEDS = 50
# Of a world size, into how many processes its devices are shared out.
PROCESSES = {2: (2,), 4: (2, 4), 8: (2, 4)}
TIMEOUT = 1500  # seconds

CASES = [
    pytest.param(
        name,
        count,
        marks=() if name in FAST and count == 2 else pytest.mark.slow,
        id=f"{name}-{count}x{scenario(name).WORLD_SIZE // count}",
    )
    for name in scenario_names()
    for count in PROCESSES[scenario(name).WORLD_SIZE]
]


def dumps(folder: Path, size: int, count: int, wanted: str, names: list[str]) -> list[Dump]:
    """What each device has; one launch for all of ``names``."""
    launch = f"xla{size}in{count}{names[0].partition(':')[0]}"
    log = folder / f"{launch}.log"
    with FileLock(folder / f"{launch}.lock"):
        if not log.exists():
            arguments = ["--xla", "--out", str(folder / launch), *names]
            log.write_text(launched(count, arguments, clean_environment(), TIMEOUT))
    files = [folder / launch / f"{wanted}.{rank}.pt" for rank in range(size)]
    if not all(file.exists() for file in files):
        pytest.fail(f"torchrun made no dump of {wanted}:\n{log.read_text()[-6000:]}")
    return [torch.load(file, weights_only=False) for file in files]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    base = base / "oracle_processes"
    base.mkdir(exist_ok=True)
    return base


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), CASES)
def test_scenario(torchrun: Launches, folder: Path, name: str, count: int) -> None:  # noqa: F811
    size = scenario(name).WORLD_SIZE
    if name in FAST:
        names = [n for n in FAST if size == scenario(n).WORLD_SIZE]
    else:
        names = [n for n in scenario_names() if size == scenario(n).WORLD_SIZE and n not in FAST]
    problems = compare(torchrun.scenario(name), dumps(folder, size, count, name, names))
    assert not problems, f"{len(problems)} mismatches:\n" + "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("count", PROCESSES[fuzz.WORLD_SIZE])
def test_random_programs(torchrun: Launches, folder: Path, count: int) -> None:  # noqa: F811
    problems = []
    for seed in range(FUZZ_SEEDS):
        names = [f"fuzz:0-{FUZZ_SEEDS - 1}"]
        found = dumps(folder, fuzz.WORLD_SIZE, count, f"fuzz_{seed}", names)
        problems += [f"{seed}: {p}" for p in compare(torchrun.chain(seed), found)]
    assert not problems, f"{len(problems)} mismatches:\n" + "\n".join(problems)
