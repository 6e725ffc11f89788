"""Every scenario and random program, under ``torchrun`` and on an xla mesh in one process."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock

import xla_dtensor
from tests.oracle import fuzz
from tests.oracle._entries import Dump, Entry, Pending, compare
from tests.oracle._harness import (
    Oracle,
    TorchrunOracle,
    XLAOracle,
    run_xla,
    scenario,
    scenario_names,
)

SCENARIOS = scenario_names()
FUZZ_SEEDS, FUZZ_BLOCK = 200, 10
LAUNCH_TIMEOUT = 900  # seconds

# One scenario for each thing that torch's API does; the others are variants of them.
FAST = (
    "expert_parallel_splits",
    "collective_gather_scatter",
    "fsdp_tp",
    "loss_parallel",
    "uneven_nested",
)


class Launches:
    """Dumps from ``torchrun``: one launch for all scenarios of a world size that are ``asked`` for,
    one for all random programs; started when it is needed first, and shared by the processes of
    pytest-xdist."""

    def __init__(self, folder: Path, asked: set[str]) -> None:
        self._folder, self._asked = folder, asked

    def scenario(self, name: str) -> list[Dump]:
        size = scenario(name).WORLD_SIZE
        names = [n for n in SCENARIOS if n in self._asked and size == scenario(n).WORLD_SIZE]
        return self._dumps(f"scenarios{size}", size, names, name)

    def chain(self, seed: int) -> list[Dump]:
        names = [f"fuzz:0-{FUZZ_SEEDS - 1}"]
        return self._dumps("fuzz", fuzz.WORLD_SIZE, names, f"fuzz_{seed}")

    def _dumps(self, launch: str, size: int, names: list[str], wanted: str) -> list[Dump]:
        folder, log = self._folder / launch, self._folder / f"{launch}.log"
        with FileLock(self._folder / f"{launch}.lock"):
            if not log.exists():
                log.write_text(launched(size, ["--out", str(folder), *names]))
        files = [folder / f"{wanted}.{rank}.pt" for rank in range(size)]
        if not all(file.exists() for file in files):
            pytest.fail(f"torchrun made no dump of {wanted}:\n{log.read_text()[-6000:]}")
        return [torch.load(file, weights_only=False) for file in files]


def launched(
    size: int,
    arguments: list[str],
    environ: dict[str, str] | None = None,
    timeout: int = LAUNCH_TIMEOUT,
) -> str:
    """Run ``tests.oracle`` in ``size`` processes; its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={size}", "-m", "tests.oracle", *arguments]
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env=environ or os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # its agent ends the workers, which aren't in its group
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        return f"{process.communicate()[0]}\nno end after {timeout} s"


@pytest.fixture(scope="session")
def torchrun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "oracle"
    folder.mkdir(exist_ok=True)
    own = [item for item in request.session.items if item.path.parent == Path(__file__).parent]
    calls = [item.callspec for item in own if hasattr(item, "callspec")]
    return Launches(folder, {call.params["name"] for call in calls if "name" in call.params})


def _mismatches(expected: list[Dump], main: Callable[[Oracle], None]) -> list[str]:
    assert all(expected), "nothing was dumped"
    return compare(expected, run_xla(main, len(expected)))


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in SCENARIOS]
)
def test_scenario(name: str, torchrun: Launches) -> None:
    problems = _mismatches(torchrun.scenario(name), scenario(name).main)
    assert not problems, f"{len(problems)} mismatches:\n" + "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, FUZZ_SEEDS, FUZZ_BLOCK))
def test_random_programs(first: int, torchrun: Launches) -> None:
    expected = {seed: torchrun.chain(seed) for seed in range(first, first + FUZZ_BLOCK)}
    problems = [
        f"seed {seed}: {problem}"
        for seed, dumps in expected.items()
        for problem in _mismatches(dumps, lambda oracle, seed=seed: fuzz.chain(oracle, seed))
    ]
    assert not problems, f"{len(problems)} mismatches:\n" + "\n".join(problems)


def test_there_are_enough_scenarios() -> None:
    assert len(SCENARIOS) >= 25
    for name in SCENARIOS:
        assert scenario(name).WORLD_SIZE in (2, 4, 8), name
        assert scenario(name).__doc__, name


# The comparison itself


def _made_up() -> list[Dump]:
    """Two ranks: a sharded tensor, a local one, a pending sum, a value, None."""
    full = torch.arange(8.0).reshape(4, 2)
    return [
        {
            "sharded": Entry(
                "sharded",
                (2,),
                local=full.chunk(2)[rank].clone(),
                full=full.clone(),
                placements="(Shard(dim=0),)",
                shape=(4, 2),
                dtype=torch.float32,
                requires_grad=True,
            ),
            "local": Entry("local", (2,), local=torch.tensor([rank, 5])),
            "pending": Entry(
                "partial", (2,), local=torch.tensor([1.0 + rank, 2.0]), pending=Pending("sum", (0,))
            ),
            "value": Entry("value", (2,), full=torch.tensor(200.0)),
            "none": Entry("none"),
        }
        for rank in range(2)
    ]


def test_equal_dumps_compare_equal() -> None:
    assert compare(_made_up(), _made_up()) == []


def _changed(name: str, rank: int, **fields: Any) -> list[Dump]:
    dumps = _made_up()
    dumps[rank][name] = replace(dumps[rank][name], **fields)
    return dumps


@pytest.mark.parametrize(
    ("name", "rank", "fields", "text"),
    [
        ("sharded", 1, {"local": torch.tensor([[4.0, 5.0], [6.0, 7.1]])}, "at [1, 1] 7.0 expected"),
        ("sharded", 0, {"full": torch.zeros(4, 2)}, "7 of 8 elements differ"),
        ("sharded", 0, {"full": torch.full((4, 2), float("nan"))}, "full value"),
        ("sharded", 1, {"placements": "(Shard(dim=1),)"}, "placements (Shard(dim=0),) expected"),
        ("sharded", 0, {"requires_grad": False}, "requires_grad True expected"),
        ("sharded", 0, {"shape": (2, 2)}, "shape (4, 2) expected"),
        ("sharded", 0, {"stride": (2, 1)}, "stride None expected"),
        ("sharded", 0, {"local": torch.zeros(1, 2)}, "local value"),
        ("sharded", 0, {"kind": "local"}, "kind sharded expected"),
        ("local", 1, {"local": torch.tensor([1, 6])}, "local value"),
        ("local", 1, {"local": torch.tensor([1.0, 5.0])}, "torch.int64 (2,) expected"),
        ("pending", 1, {"local": torch.tensor([1.9, 2.0])}, "3.0 expected, got 2.9"),
        ("value", 0, {"full": torch.tensor(200.01)}, "full value"),
        ("none", 0, {"kind": "local", "local": torch.zeros(1)}, "kind none expected"),
    ],
)
def test_a_wrong_value_is_reported(name: str, rank: int, fields: dict[str, Any], text: str) -> None:
    problems = compare(_made_up(), _changed(name, rank, **fields))
    assert any(p.startswith(f"{name}, rank {rank}: ") and text in p for p in problems), problems
    assert all(p.startswith(f"{name}, rank ") for p in problems)


def test_only_the_sum_of_pending_values_counts() -> None:
    moved = _made_up()
    for rank, values in enumerate(([3.0, 4.0], [0.0, 0.0])):
        entry = moved[rank]["pending"]
        moved[rank]["pending"] = replace(entry, local=torch.tensor(values))
    assert compare(_made_up(), moved) == []


def test_rounding_is_no_difference() -> None:
    assert compare(_made_up(), _changed("value", 0, full=torch.tensor(200.001))) == []


def test_a_missing_name_and_a_missing_rank_are_reported() -> None:
    dumps = _made_up()
    del dumps[1]["local"]
    assert compare(_made_up(), dumps) == ["rank 1: the names differ: missing ['local'], extra []"]
    assert compare(_made_up(), dumps[:1]) == ["2 ranks expected, got 1"]


@pytest.mark.slow
def test_exchanged_ranks_are_reported(torchrun: Launches) -> None:
    dumps = torchrun.scenario("collective_all_reduce")
    problems = compare(dumps, dumps[1:] + dumps[:1])
    assert len([p for p in problems if p.startswith("sum.x, ")]) == 4
    assert not [p for p in problems if p.startswith("sum.y, ")]


@pytest.mark.parametrize("vary", [(), ("a",), ("b",), ("a", "b"), ("b", "a")])
def test_inputs_are_equal_in_both_forms(
    vary: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.Tensor] = []

    def from_device_values(values: list[torch.Tensor], mesh: Any, dims: Any) -> torch.Tensor:
        given.extend(values)
        return values[0]

    monkeypatch.setattr(xla_dtensor, "from_device_values", from_device_values, raising=False)
    xla = XLAOracle(4)
    xla.mesh((2, 2), ("a", "b"))
    xla.local("x", (3,), vary)
    assert len(given) == 4
    for value, coordinate in zip(given, itertools.product(range(2), repeat=2), strict=True):
        rank = TorchrunOracle(4)
        rank._mesh = SimpleNamespace(  # type: ignore[assignment]
            mesh_dim_names=("a", "b"), get_coordinate=lambda c=coordinate: list(c)
        )
        assert torch.equal(rank.local("x", (3,), vary), value)
    assert len({tuple(v.tolist()) for v in given}) == 2 ** len(vary)
