"""Every case for every kind of ranks that it makes sense for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import tests.horovod.cases  # noqa: F401  (registers them)
import xla_dtensor as xd
import xla_dtensor.horovod as hvd
from tests import launch
from tests.horovod.ranks import CASES, DEVICES, PROCESSES, THREADS

RANKS = 4

# Programs for several devices take long to compile: of these cases few are fast.
FAST_ON_DEVICES = {
    "all_asynchronous_forms",
    "broadcast_object",
    "errors_of_the_optimizer",
    "horovod_allgather_variable_size",
    "horovod_allreduce",
    "horovod_allreduce_grad",
    "horovod_alltoall_splits_type_error",
    "horovod_rank",
    "process_sets_static",
}


def chosen(where: str) -> list[Any]:
    """The cases for one kind of ranks; all but few are slow."""
    fast = FAST_ON_DEVICES if where == DEVICES else {n for n, c in CASES.items() if c.fast}
    return [
        pytest.param(name, marks=() if name in fast else pytest.mark.slow)
        for name, case in CASES.items()
        if where in case.where
    ]


@pytest.fixture
def four_devices() -> Iterator[None]:
    """One process, whose ranks are four devices."""
    hvd.shutdown()
    xd.set_mesh(xd.DeviceMesh("xla", list(range(RANKS)), mesh_dim_names=("rank",)))
    hvd.init()
    yield
    hvd.shutdown()
    xd.set_mesh(None)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", chosen(DEVICES))
def test_ranks_are_devices(name: str, four_devices: None) -> None:
    CASES[name].body()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", chosen(THREADS))
def test_ranks_are_threads(name: str) -> None:
    def body() -> None:
        hvd.init()
        CASES[name].body()

    hvd.run(body, np=RANKS)


@pytest.fixture(scope="module")
def in_processes() -> dict[int, dict[str, list[str]]]:
    """What became of the cases, by the number of processes: filled as it is asked for."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if PROCESSES in case.where])
def test_ranks_are_processes(
    name: str, count: int, in_processes: dict[int, dict[str, list[str]]]
) -> None:
    if count not in in_processes:
        in_processes[count] = of_processes(count, [])
    found = in_processes[count][name]
    assert found == ["ok"] * count, "\n".join(found)


@pytest.mark.slow
def test_some_in_two_processes() -> None:
    some = [
        "horovod_allreduce_error", "ranks_that_wait_for_different_names", "force_allreduce",
        "broadcast_object",
    ]  # fmt: skip
    found = of_processes(2, some)
    assert found == {name: ["ok", "ok"] for name in some}


@pytest.mark.slow
def test_processes_of_two_devices() -> None:
    """The first of them has the process's values."""
    some = [
        "horovod_allgather_variable_size", "horovod_alltoall", "horovod_allreduce_process_sets",
        "gradients_are_averaged", "model_parallelism", "broadcast_state_gpu", "horovod_rank",
        "tensors_on_the_ranks_devices",
    ]  # fmt: skip
    found = of_processes(2, some, JAX_NUM_CPU_DEVICES="2")
    assert found == {name: ["ok", "ok"] for name in some}


def of_processes(count: int, names: list[str], **variables: str) -> dict[str, list[str]]:
    """How cases went, all in one launch: by name what each process says."""
    command = ["-m", "tests.horovod.programs.cases", *names]
    variables = {"JAX_PLATFORMS": "cpu", **variables}
    results = launch.run(command, count, 120 + 60 * count, variables)
    found: dict[str, list[str]] = {}
    for result in results:
        assert result.code == 0, result.output
        (line,) = [each for each in result.output.splitlines() if each.startswith("CASES ")]
        for name, text in json.loads(line.removeprefix("CASES ")).items():
            found.setdefault(name, []).append(text)
    return found


@pytest.mark.slow
def test_a_compiled_step_in_processes() -> None:
    command = ["-m", "tests.horovod.programs.compiled"]
    outputs = launch.succeeded(launch.run(command, 2, 120, {"JAX_PLATFORMS": "cpu"}))
    assert all(output.rstrip().endswith("all of it") for output in outputs)
