"""Training goes on when processes and hosts are lost and come back; every loss is CPU torch's."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import pytest

import xla_dtensor as xd
from tests import launch
from tests.elastic.hosts import DEVICES, Hosts
from tests.elastic.programs.training import expected, rows
from tests.runtime.network import HostNetwork
from xla_dtensor.checkpoint.memory import FOLDER
from xla_dtensor.checkpoint.stopping import progress

STEPS = 60
LAUNCH = "xla_dtensor.elastic.hosts.launch_agent"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hosts": 0}, "least, most"),
        ({"hosts": (3, 2)}, "least, most"),
        ({"hosts": (1, 4)}, "endpoint="),
        ({"processes_per_host": 0}, r"processes_per_host=0\): give 1"),
        ({"restarts": -1}, r"restarts=-1\): give 0"),
        ({"grace": 0}, r"grace=0\): give a number of seconds above 0"),
        ({"settle": -1.0}, r"settle=-1.0\): give"),
        ({"heartbeat_timeout": 0}, r"heartbeat_timeout=0\): give"),
        ({"heartbeat_timeout": float("inf")}, r"heartbeat_timeout=inf\): give"),
        (
            {"hosts": 2, "endpoint": "a:29500", "heartbeat_timeout": 20, "settle": 5},
            "settle of more than heartbeat_timeout, such as 30",
        ),
        ({"hosts": 2, "endpoint": "host-b"}, 'give host:port, as "host-b:29500"'),
        ({"hosts": 2, "endpoint": "host-b:"}, 'as "host-b:29500"'),
        ({"hosts": 2, "endpoint": ":29500"}, "give host:port"),
        ({"endpoint": "host-b:123456"}, 'as "host-b:29500"'),
    ],
)
def test_arguments_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, object], words: str
) -> None:
    """They raise where they are given, and nothing is started."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(LAUNCH, lambda *_: pytest.fail("it is started"))
    with pytest.raises(xd.HostsError, match=words):
        xd.elastic.run(lambda devices: None, **given)  # type: ignore[arg-type]


def test_a_switch_that_no_process_could_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it may have been set after the import, which doesn't read it again."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("XLA_DTENSOR_START_TIMEOUT", "0")
    monkeypatch.setattr(LAUNCH, lambda *_: pytest.fail("it is started"))
    with pytest.raises(xd.HostsError, match="XLA_DTENSOR_START_TIMEOUT='0'"):
        xd.elastic.run(lambda devices: None)


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (xd.DistributedError("process 1 is gone", of_others=True), False),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to 10.0.0.2:1234"), False),
        (RuntimeError("a bad batch"), True),
        (xd.DistributedError("process 1 has jax 0.9, process 0 has jax 0.10"), True),
        (xd.DivergenceError("the processes don't do the same"), True),
        (SystemExit("no data found"), True),
        (SystemExit(3), True),
        (SystemExit(0), False),
        (SystemExit(), False),
    ],
)
def test_which_errors_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException, is_kept: bool
) -> None:
    """Those that come of another process's loss don't, and those that will come again do."""
    for name, value in launch.torchrun_variables(0, 1, launch.free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr("xla_dtensor.runtime.heartbeats._running", Mock())  # as of several
    # Another test of this process may have sent it a signal: it would be ended for that.
    monkeypatch.setattr(progress, "stopped_by", None)

    def train(devices: int) -> None:
        raise error

    with pytest.raises(type(error)):
        xd.elastic.run(train)
    assert bool([*tmp_path.iterdir()]) == is_kept


def started(folder: Path, how: str, processes: int = 1, **variables: str) -> subprocess.Popen[str]:
    program = "tests.elastic.programs.failing"
    return subprocess.Popen(
        [sys.executable, "-m", program, str(folder), how, str(processes)],
        cwd=launch.ROOT,
        env=launch.clean_environment()
        | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
        | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "count"), [("never", 0, 1), ("once", 0, 2), ("always", 1, 2)]
)
def test_exceptions(tmp_path: Path, how: str, code: int, count: int) -> None:
    """One that comes again in the same line isn't tried a third time."""
    process = started(tmp_path, how)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == code, output
    assert calls(tmp_path) == [str(DEVICES)] * count
    assert ("done" in output) == (code == 0)
    if code:
        last = output.strip().splitlines()[-2:]
        assert "DistributedError: the training function has raised the same twice" in last[0]
        assert "KeyError: 'no such thing'" in last[0]
        assert "failing.py" in last[1]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("together", 0), ("always", 1)])
def test_all_processes_of_a_host_raise(tmp_path: Path, how: str, code: int) -> None:
    """That is one exception, and it is tried once more."""
    process = started(tmp_path, how, 2)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == code, output
    assert len(calls(tmp_path)) == 4
    assert ("has raised the same twice" in output) == (code == 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "processes", "words"),
    [
        ("exit", 1, "SystemExit: no data found by"),
        ("other text", 1, "RuntimeError: process"),
        ("diverge", 2, "DivergenceError: the processes don't do the same in their step"),
    ],
)
def test_what_comes_again_ends_the_run(
    tmp_path: Path, how: str, processes: int, words: str
) -> None:
    """Whatever its text says, and though processes are to blame together."""
    process = started(tmp_path, how, processes)
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.terminate()  # one that would go on for ever
    assert process.returncode == 1, output
    assert len(calls(tmp_path)) == 2 * processes
    assert "the training function has raised the same twice" in output
    assert words in output.rpartition("isn't started again: ")[2]


@pytest.mark.slow
def test_an_exit_without_a_code_is_the_end(tmp_path: Path) -> None:
    process = started(tmp_path, "exit 0", 2)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert len(calls(tmp_path)) == 2


@pytest.mark.slow
def test_one_of_two_processes_exits_with_a_text(tmp_path: Path) -> None:
    """The other one, which waits for it, ends at once."""
    process = started(tmp_path, "one exits", 2)
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.terminate()  # one that would go on for ever
    assert process.returncode == 1, output
    assert len(calls(tmp_path)) == 4
    assert "has ended with SystemExit: no data found by" in output
    assert "SystemExit: no data" in output.rpartition("isn't started again: ")[2]


@pytest.mark.slow
def test_somebody_else_has_started_it(tmp_path: Path) -> None:
    process = started(tmp_path, "always", **launch.torchrun_variables(0, 1, launch.free_port()))
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1 and calls(tmp_path) == [str(DEVICES)], output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_agent(tmp_path: Path, number: int) -> None:
    """The step in flight is finished and saved, and the next start goes on."""
    process = started(tmp_path, "never")
    assert process.stdout is not None
    while "counted to 3" not in process.stdout.readline():
        pass
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + number, output
    again, _ = started(tmp_path, "never").communicate(timeout=100)
    # Not the line of the program that a traceback shows where the interrupt comes in print.
    done = [int(found) for found in re.findall(r"counted to (\d+)$", output + again, re.M)]
    if number == signal.SIGTERM:
        assert done == [*range(4, 11)], done
    assert "done" in again


@pytest.mark.slow
def test_hosts_are_lost_and_come_back(tmp_path: Path) -> None:
    program = ["tests.elastic.programs.training", str(tmp_path), str(STEPS), "0.5"]
    with Hosts(tmp_path, program, 3) as hosts:
        for name in "abc":
            hosts.start(name)
        hosts.wait_for(lambda log: len(log) > 5 and log[-1][1] == 3 * DEVICES)
        hosts.lose("a")
        hosts.wait_for(lambda log: log[-1][1] == 2 * DEVICES)
        before = hosts.steps()[-1][0]
        hosts.start("a")
        hosts.wait_for(lambda log: log[-1][1] == 3 * DEVICES)
        came = next(step for step, devices, *_ in hosts.steps()[::-1] if devices == 2 * DEVICES)
        assert came >= before
        count = len(hosts.steps())
        hosts.kill_process("b")
        hosts.wait_for(lambda log: len(log) > count + 2)
        hosts.wait_for(lambda log: log[-1][0] == STEPS - 1)
        end = time.monotonic() + 60
        while hosts.names() and time.monotonic() < end:
            time.sleep(0.1)
        assert not hosts.names()  # all have come to their end
        log = hosts.steps()
    assert {step for step, *_ in log} == set(range(STEPS))
    check(log)
    # A step that was in flight may be there twice; copies in memory lose no more.
    assert len(log) <= STEPS + 3 + 2 * 2


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Two of which both have begun to train."""
    program = ["tests.elastic.programs.training", str(folder), "1000", "0.5"]
    with Hosts(folder, program, 2) as hosts:
        for name in "ab":
            hosts.start(name)
        hosts.wait_for(lambda log: len(log) > 5 and log[-1][1] == 2 * DEVICES)
        yield hosts


@pytest.mark.slow
def test_a_process_stands_still(tmp_path: Path) -> None:
    """Its agent, which can't end it by SIGTERM, kills it after `grace`, and meets the others."""
    with two_hosts(tmp_path) as hosts:
        stopped = time.time()
        hosts.stop_process("b")
        # A step may be in flight; that one is gone takes 5 s to be noticed.
        hosts.wait_for(lambda log: log[-1][1] == 2 * DEVICES and log[-1][-1] > stopped + 3)
        took = hosts.steps()[-1][-1] - stopped
    starts = (tmp_path / "starts.jsonl").read_text().splitlines()
    began = json.loads(starts[-1])[0] - stopped
    # Noticed after 5 s, and 10 of grace; where torch's 30 s count these are 35. How long processes
    # take from their beginning to a step is the machine's.
    assert 5 < began < 30, f"begun again after {began:.1f} s, the next step after {took:.1f}"


@pytest.mark.slow
def test_the_endpoint_is_lost(tmp_path: Path) -> None:
    """All end, and say what is lost with it; the next run begins with what is on the disk."""
    with two_hosts(tmp_path) as hosts:
        hosts.lose_endpoint()
        for name in "ab":
            assert hosts.wait(name, 60) == 1
            told = hosts.log(name).rpartition("DistributedError: ")[2]
            assert f"doesn't reach the endpoint localhost:{hosts.port}" in told
            assert "begins with the newest checkpoint on the disk" in told
            assert f"python -m xla_dtensor.elastic {hosts.port} on a machine" in told
            assert "RendezvousConnectionError" not in told


@pytest.mark.slow
def test_a_host_is_cut_off_from_the_network(tmp_path: Path) -> None:
    """The others go on; when it is back, it is taken in by itself."""
    try:
        network = HostNetwork(4, tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    program = ["tests.elastic.programs.training", str(tmp_path), "1000", "0.5"]
    names = [f"host-{i}" for i in range(4)]
    within = {name: network.on(i) for i, name in enumerate(names)}
    with network, Hosts(tmp_path, program, 3, names[3], within) as hosts:
        for name in names[:3]:
            hosts.start(name)
        hosts.wait_for(lambda log: len(log) > 5 and log[-1][1] == 3 * DEVICES)
        network.cut(2, "silent")
        hosts.wait_for(lambda log: log[-1][1] == 2 * DEVICES)
        network.mend(2)
        hosts.wait_for(lambda log: log[-1][1] == 3 * DEVICES)
        count = len(hosts.steps())
        hosts.wait_for(lambda log: len(log) > count + 2)
        log = hosts.steps()
    assert {step for step, *_ in log} == set(range(log[-1][0] + 1))
    check(log)
    # Of each change a step may be there twice, whose copies not all had yet.
    assert len(log) <= log[-1][0] + 1 + 2 * 2


def check(log: list[list[Any]]) -> None:
    """Each step had its samples, and CPU torch's loss."""
    wanted = expected(log[-1][0] + 1)
    for step, _, loss, samples, _ in log:
        assert samples == rows(step)
        assert loss == pytest.approx(wanted[step], rel=1e-5)
