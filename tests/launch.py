"""Starting several processes of one program, as torchrun does, without its agent; and their end.

Every launch ends: after its time all processes are killed.
"""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass
class Result:
    """How a process has ended.

    Attributes:
        code: its exit code; that of a killed one is negative.
        output: what it has printed, to both streams.
        seconds: when it ended, from the start of all.
    """

    code: int
    output: str
    seconds: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def clean_environment() -> dict[str, str]:
    """Of a process that sets its number of simulated devices by its first mesh."""
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
    }
    environ.pop("JAX_NUM_CPU_DEVICES", None)
    return environ


def torchrun_variables(rank: int, count: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


class _KeyValues(http.server.BaseHTTPRequestHandler):
    values: dict[str, bytes]

    def do_PUT(self) -> None:
        self.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        value = self.values.get(self.path)
        self.send_response(404 if value is None else 200)
        self.end_headers()
        self.wfile.write(value or b"")

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def horovods_server() -> Iterator[int]:
    """The port of a key-value server as ``horovodrun`` keeps one for its workers to meet at."""
    handler = type("_KeyValues", (_KeyValues,), {"values": {}})
    server = http.server.ThreadingHTTPServer(("", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Processes:
    """Processes of one program that run now.

    Args:
        command: what each runs, after ``python``.
        variables: of each process, beside those of this one.
        within: of each, the command that runs ``python``, as its own process.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Sequence[Mapping[str, str]],
        within: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self._began = time.monotonic()
        self._files = []
        self.all = []
        for own, before in zip(variables, within or [()] * len(variables), strict=True):
            read, write = os.pipe()
            self._files.append(read)
            process = subprocess.Popen(
                [*before, sys.executable, *command],
                cwd=ROOT,
                env={**clean_environment(), **own},
                stdout=write,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            os.close(write)
            self.all.append(process)

    def kill(self) -> None:
        """End them all, whatever they do."""
        for process in self.all:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def seconds(self) -> float:
        """Since they were started."""
        return time.monotonic() - self._began

    def wait(self, seconds: float) -> list[Result]:
        """How they have ended; those that haven't in this time are killed."""
        outputs = [b""] * len(self.all)
        ends: list[float | None] = [None] * len(self.all)
        for read in self._files:
            os.set_blocking(read, False)
        try:
            while None in ends and time.monotonic() - self._began < seconds:
                for i, process in enumerate(self.all):
                    outputs[i] += self._read(i)
                    if ends[i] is None and process.poll() is not None:
                        ends[i] = time.monotonic() - self._began
                time.sleep(0.02)
        finally:
            self.kill()
        results = []
        for i, process in enumerate(self.all):
            outputs[i] += self._read(i)
            os.close(self._files[i])
            end = ends[i] or time.monotonic() - self._began
            results.append(Result(process.returncode, outputs[i].decode(errors="replace"), end))
        return results

    def _read(self, i: int) -> bytes:
        found = b""
        while True:
            try:
                piece = os.read(self._files[i], 65536)
            except BlockingIOError:
                return found
            if not piece:
                return found
            found += piece


def run(
    command: Sequence[str], count: int, seconds: float, variables: Mapping[str, str] | None = None
) -> list[Result]:
    """Run a program in ``count`` processes that find each other as torchrun's do."""
    port = free_port()
    environments = [
        torchrun_variables(rank, count, port) | dict(variables or {}) for rank in range(count)
    ]
    return Processes(command, environments).wait(seconds)


def succeeded(results: Sequence[Result]) -> list[str]:
    """What processes have printed, if none has failed."""
    for rank, result in enumerate(results):
        assert result.code == 0, f"process {rank} ended with {result.code}:\n{result.output}"
    return [result.output for result in results]
