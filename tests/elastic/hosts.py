"""Hosts of one training, here as processes of one machine: an agent each, and what it has started.

A host that is lost is its agent and all below it, killed at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.launch import ROOT, clean_environment, free_port

DEVICES = 2  # of a host


class Hosts:
    """Where a training runs.

    Args:
        folder: for its log and checkpoints.
        program: a module, with its arguments; the endpoint and the number of hosts come after them.
        most: how many hosts there may be.
        meet_on: the host on which they meet.
        within: of that host and of others, the command that runs what runs there.
    """

    def __init__(
        self,
        folder: Path,
        program: list[str],
        most: int,
        meet_on: str = "localhost",
        within: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.folder, self._most, self._within = folder, most, within or {}
        self.port = free_port()
        self._program = [*program, f"{meet_on}:{self.port}", str(most)]
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        command = [*self._within.get(meet_on, ()), sys.executable]
        command += ["-m", "xla_dtensor.elastic", str(self.port)]
        out = subprocess.PIPE
        self._keeper = subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=out)
        assert self._keeper.stdout is not None
        self._keeper.stdout.readline()  # it listens

    def start(self, name: str) -> None:
        """A host comes, or comes back."""
        environ = clean_environment() | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(DEVICES),
            "NPROC": "16",
            "XLA_DTENSOR_START_TIMEOUT": "120",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self._agents[name] = subprocess.Popen(
                [*self._within.get(name, ()), sys.executable, "-m", *self._program],
                cwd=ROOT,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def names(self) -> list[str]:
        """Those that are there."""
        return [name for name, agent in self._agents.items() if agent.poll() is None]

    def lose(self, name: str) -> None:
        """Kill an agent and its processes."""
        agent = self._agents.pop(name)
        for pid in [agent.pid, *_below(agent.pid)]:
            _kill(pid)
        agent.wait()

    def kill_process(self, name: str) -> None:
        """Kill the processes of a host, and not its agent."""
        for pid in _below(self._agents[name].pid):
            _kill(pid)

    def stop_process(self, name: str) -> None:
        """Have the processes of a host stand still, and not its agent."""
        for pid in _below(self._agents[name].pid):
            os.kill(pid, signal.SIGSTOP)

    def lose_endpoint(self) -> None:
        """Kill what keeps the store at which they meet."""
        self._keeper.kill()
        self._keeper.wait()

    def signal(self, name: str, number: int) -> None:
        os.kill(self._agents[name].pid, number)

    def wait(self, name: str, timeout: float) -> int:
        """The exit code of an agent."""
        return self._agents[name].wait(timeout)

    def steps(self) -> list[list[Any]]:
        """What the training has logged."""
        path = self.folder / "steps.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait_for(self, reached: Callable[[list[list[Any]]], bool], timeout: float = 240) -> None:
        """Wait until the steps that are logged fulfil a condition."""
        end = time.monotonic() + timeout
        while not reached(self.steps()):
            logs = "".join(f"== {path.stem}\n{path.read_text()[-3000:]}" for path in self._logs())
            assert time.monotonic() < end, f"{len(self.steps())} steps in {timeout} s\n{logs}"
            assert self.names(), f"no host is left\n{logs}"
            time.sleep(0.1)

    def _logs(self) -> list[Path]:
        return sorted(self.folder.glob("*.log"))

    def close(self) -> None:
        """Kill all of them."""
        for name in [*self._agents]:
            self.lose(name)
        self._keeper.kill()
        self._keeper.communicate()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _below(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    found = []
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *_below(int(child))]
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(pid, signal.SIGKILL)
