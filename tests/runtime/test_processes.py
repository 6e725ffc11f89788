"""Several processes: what everything means, and what happens when one fails or differs."""

from __future__ import annotations

import os
import signal
import time
import traceback
import types
from pathlib import Path

import pytest

import xla_dtensor as xd
from tests import launch
from tests.test_docstrings import EXAMPLES, OF_SEVERAL_PROCESSES
from xla_dtensor.errors import DistributedError
from xla_dtensor.runtime import heartbeats, last_words, processes

FAILING = ["-m", "tests.runtime.programs.failing"]
HEARTBEAT = {"XLA_DTENSOR_HEARTBEAT_TIMEOUT": "8"}


@pytest.mark.slow
def test_what_everything_means() -> None:
    outputs = launch.succeeded(launch.run(["-m", "tests.runtime.programs.meanings"], 2, 200))
    assert all(output.rstrip().endswith("all of it") for output in outputs)


@pytest.mark.slow
def test_the_same_with_every_launch_compared() -> None:
    checks = {"XLA_DTENSOR_CHECK_PROCESSES": "1"}
    run = launch.run(["-m", "tests.runtime.programs.meanings"], 2, 300, checks)
    assert all(output.rstrip().endswith("all of it") for output in launch.succeeded(run))


@pytest.mark.slow
def test_one_device_per_process_is_as_in_torch() -> None:
    run = launch.run(["-m", "tests.runtime.programs.one_device_each"], 2, 200)
    assert all(output.rstrip().endswith("all of it") for output in launch.succeeded(run))


@pytest.mark.slow
def test_data_parallel_scripts_of_torch() -> None:
    run = launch.run(["-m", "tests.runtime.programs.data_parallel"], 2, 200)
    assert all(output.rstrip().endswith("all of it") for output in launch.succeeded(run))


def ended(results: list[launch.Result], index: int) -> str:
    """What a process has printed that ended by itself, with an error."""
    assert results[index].code not in (0, -signal.SIGKILL), results[index].output
    return results[index].output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, pytest.param(0, id="the one that coordinates")])
def test_a_killed_process_is_named_by_the_others(victim: int) -> None:
    began = time.monotonic()
    variables = HEARTBEAT | {"XLA_DTENSOR_TEST_VICTIM": str(victim)}
    results = launch.run([*FAILING, "kill"], 2, 60, variables)
    assert results[victim].code == -signal.SIGKILL
    output = ended(results, 1 - victim)
    assert f"process {1 - victim} on {os.uname().nodename} (pid " in output
    assert f"since process {victim} on {os.uname().nodename} (pid " in output
    assert results[1 - victim].seconds - results[victim].seconds < 25
    assert time.monotonic() - began < 65


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the main thread", "another thread", "eager", "caught"])
def test_a_process_killed_in_a_collective_is_named_with_the_line(where: str) -> None:
    """JAX's own words are `Gloo all-reduce failed: ... Connection reset by peer`, of nobody."""
    results = launch.run(["-m", "tests.runtime.programs.killed", where], 2, 90, HEARTBEAT)
    assert results[1].code == -signal.SIGKILL
    output = ended(results, 0)
    assert f"process 1 on {os.uname().nodename} (pid " in output
    assert "it was last seen at " in output
    assert "killed.py" in output.partition("it was last seen at")[2].splitlines()[0]
    if "Gloo all-reduce failed" in output:  # or it hung, and was ended by the missing signs of life
        assert "DistributedError" in output
        assert "JaxRuntimeError" not in output
        own = output.partition("computed something together with the others\n  at ")[2]
        assert ("(compiled step " in own.partition("\n")[0]) == (where != "eager")
    if where in ("the main thread", "eager"):  # once, and of the package's frames nothing
        assert output.count("it was last seen at ") == 1, output
        assert "/xla_dtensor/runtime/arrays.py" not in output, output
    if where == "caught" and "Gloo all-reduce failed" in output:
        assert "saved what there is" in output
    assert results[0].seconds - results[1].seconds < 25


def test_what_jax_repeats_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation that waits for one that has failed puts its words before those of that one."""
    running = types.SimpleNamespace(failing=False, named=None)
    monkeypatch.setattr(heartbeats, "_running", running)
    monkeypatch.setattr(heartbeats, "_gone", lambda running: "process 1 on host-b (pid 2) is gone")
    monkeypatch.setattr(heartbeats, "say_failed", lambda text: None)
    monkeypatch.setattr(processes, "known", lambda index: f"process {index} on host-a (pid 1)")
    before, cause = "Error dispatching computation: ", "Gloo AllGather failed: [gloo/pair.cc:547] x"
    with pytest.raises(DistributedError) as raised, heartbeats.NamingTheLost():
        raise RuntimeError(f"INTERNAL: {before * 100}{cause}")
    assert str(raised.value).endswith(f"JAX says: INTERNAL: {before}{cause}")
    assert running.failing and running.named is raised.value


def test_a_traceback_ends_with_the_users_frame() -> None:
    with pytest.raises(xd.MeshError) as raised:
        xd.DeviceMesh("xla", [0, 0])
    trace = raised.value.__traceback__
    assert "xla_dtensor" in traceback.extract_tb(trace)[-1].filename
    last_words.cut(trace)
    assert traceback.extract_tb(trace)[-1].filename == __file__


@pytest.mark.slow
def test_when_process_0_is_killed_the_other_says_where_both_were() -> None:
    """JAX ends the other at once then, by a signal, and its own words are of C++ and a "leader"."""
    variables = HEARTBEAT | {"XLA_DTENSOR_TEST_VICTIM": "0"}
    run = ["-m", "tests.runtime.programs.killed", "the main thread"]
    results = launch.run(run, 2, 90, variables)
    assert results[0].code == -signal.SIGKILL
    said = ended(results, 1).partition("xla_dtensor: process 1 on ")[2]
    assert f"process 0 on {os.uname().nodename} (pid " in said
    seen = said.partition("it was last seen at ")[2].partition("\n")[0]
    own = said.partition("this one is at ")[2].partition("\n")[0]
    for where in (seen, own):
        assert "killed.py" in where and "(compiled step " in where, said


@pytest.mark.slow
def test_one_compiles_for_longer_than_transports_wait() -> None:
    results = launch.run(["-m", "tests.runtime.programs.late", "compiling"], 2, 150, HEARTBEAT)
    assert all("the value is 56.0" in output for output in launch.succeeded(results))


@pytest.mark.slow
def test_one_is_later_than_transports_wait() -> None:
    """All are alive, and none would ever go on: both end, and say who was late."""
    results = launch.run(["-m", "tests.runtime.programs.late", "launching"], 2, 150, HEARTBEAT)
    for index in range(2):
        output = ended(results, index)
        assert "a connection has failed, though all processes give signs of life" in output
        assert f"process 1 on {os.uname().nodename} (pid " in output
        assert "was last seen at " in output and "time.sleep(LATE)" in output
    assert "step(x).item()" in results[0].output and "JAX says: " in results[0].output


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_stacks_of_all_processes_on_a_signal(asked: int, tmp_path: Path) -> None:
    """Also of one that waits in a collective, whose Python runs no handler."""
    run = ["-m", "tests.runtime.programs.hanging", str(asked), str(tmp_path)]
    results = launch.run(run, 2, 90, HEARTBEAT)
    (file,) = tmp_path.glob("xla_dtensor_stacks_*.txt")
    assert str(file) in results[asked].output
    first, second = file.read_text().split("process 1 on ")
    assert first.startswith("process 0 on ")
    assert "step(x).item()  # waits" in first
    assert "time.sleep(0.05)  # hangs" in second
    assert "thread MainThread" in first and "thread MainThread" in second


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_named_by_the_others(victim: int) -> None:
    variables = HEARTBEAT | {"XLA_DTENSOR_TEST_VICTIM": str(victim)}
    results = launch.run([*FAILING, "stop"], 2, 60, variables)
    assert results[1 - victim].seconds < 55
    assert f"since process {victim} on " in ended(results, 1 - victim)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_an_exception_on_one_process_ends_all(victim: int) -> None:
    variables = HEARTBEAT | {"XLA_DTENSOR_TEST_VICTIM": str(victim)}
    results = launch.run([*FAILING, "raise"], 2, 60, variables)
    assert 'raise ValueError("a bad batch")' in ended(results, victim)
    other = ended(results, 1 - victim)
    assert f"process {victim} on " in other and "has ended with ValueError: a bad batch" in other
    assert "failing.py" in other  # the line
    assert abs(results[0].seconds - results[1].seconds) < 25


# What process 1 does, and the words of both sides.
DIFFERENCES = {
    "order": ("aten::cos", "aten::sin", "x.cos()", "x.sin()"),
    "operation": ("aten::exp", "x.exp()", "step(x).item()"),
    "mesh": ("DeviceMesh((2, 4)", "DeviceMesh((4, 2)"),
    "step": ("compiles a step of 3 operations (digest ", "step(x).item()"),
    "read": ("print(x)", "step(x).item()"),
    "leave": ("has come to the end of its program", "step(x).item()"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", DIFFERENCES)
def test_processes_that_differ_say_where(how: str) -> None:
    results = launch.run([*FAILING, how], 2, 90, HEARTBEAT)
    for index in range(2):
        output = ended(results, index)
        for word in DIFFERENCES[how]:
            assert word in output, output
        assert "process 0 on " in output and "process 1 on " in output
    # Not the heartbeat: they notice in seconds.
    assert max(result.seconds for result in results) < 75


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OF_SEVERAL_PROCESSES))
def test_examples_that_raise_in_several_processes(name: str) -> None:
    results = launch.run(["-c", EXAMPLES[name]], 2, 90, HEARTBEAT)
    assert all(name in ended(results, index) for index in range(2))


@pytest.mark.slow
def test_a_hundred_starts_and_stops() -> None:
    program = (
        "import xla_dtensor as xd, torch\n"
        "mesh = xd.init_device_mesh('xla', (4,))\n"
        "x = xd.distribute_tensor(torch.ones(4), mesh, [xd.Shard(0)])\n"
        "assert x.sum().item() == 4\n"
    )
    for _ in range(100):
        launch.succeeded(launch.run(["-c", program], 2, 120))
