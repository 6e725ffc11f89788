"""``python -m xla_dtensor.debug.device``: what a backend can do, and what needs what it can't.

    python -m xla_dtensor.debug.device
    python -m xla_dtensor.debug.device --platform neuron --json neuron.json
    python -m xla_dtensor.debug.device --devices 8 --only sort "scan"

About fifty tiny programs are compiled, run on all devices of the platform, and compared with numpy.
They run in a process of their own, and in a new one after each that has ended it or has not come
back: one thing that a backend can't do hides no other. This process starts no backend, as some
devices belong to one process alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xla_dtensor.debug._probe_child import table
from xla_dtensor.debug._probes import Probe

_START = 120.0  # seconds that a backend may take to start, or --timeout if that is longer
_END = 10.0  # that its process may take to end
_FINE = ("ok", "unused")


@dataclass(frozen=True)
class Outcome:
    """How a probe went.

    Attributes:
        name: its name, or ``"start"`` and ``"end"`` of the process.
        word: ``"ok"``, ``"unused"`` (on this platform), ``"wrong"``, ``"failed"``, ``"timed out"``,
            ``"ended the process"``, ``"not run"``.
        said: what there is to say of it.
        seconds: how long it took.
    """

    name: str
    word: str
    said: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.said:
            return self.word
        return f"{self.word} {self.said}" if self.said[0] == "(" else f"{self.word}: {self.said}"


@dataclass
class Options:
    """How probes are run.

    Attributes:
        platform: JAX's name of it; None for the one that JAX takes.
        devices: how many CPU devices to simulate.
        timeout: seconds that a probe may take.
        path: of a file with ``PROBES`` in place of ours.
    """

    platform: str | None = None
    devices: int = 1
    timeout: float = 60.0
    path: str | None = None

    def environment(self) -> dict[str, str]:
        """Of the processes in which they run."""
        found = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"}  # the compiler is to be tried
        if self.platform is not None:
            found["JAX_PLATFORMS"] = self.platform
        if self.devices > 1:
            found["JAX_NUM_CPU_DEVICES"] = str(self.devices)
        return found


@dataclass
class DeviceReport:
    """What has come of all.

    Attributes:
        backend: what there is: the platform, devices, versions; empty if it doesn't start.
        outcomes: in the order in which they ran.
    """

    backend: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    def bad(self) -> list[Outcome]:
        """Those that didn't go as they should."""
        return [one for one in self.outcomes if one.word not in _FINE]


def main(arguments: Sequence[str], path: str | None = None) -> int:
    """Run the command.

    Args:
        arguments: its own.
        path: of a file with ``PROBES`` in place of ours.

    Returns:
        its exit status: 1 where something isn't as it should be, 130 after an interrupt. (A wrong
        argument ends it with 2.)

    Example::

        from xla_dtensor.debug import device

        assert device.main(["--platform", "cpu", "--only", "sort of several operands"]) == 0
    """
    probes = table(path)
    given = _parsed(arguments, probes)
    options = Options(given.platform, given.devices or 1, given.timeout, path)
    names = [name for name in probes if not given.only or name in given.only]
    width = max(map(len, names))
    report = DeviceReport()
    try:
        with contextlib.closing(outcomes(names, options, report)) as found:
            for one in found:
                report.outcomes.append(one)
                if one.word != "not run":
                    print(f"{one.name:{width}}  {one.seconds:5.1f} s  {one}", flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(_summary(report, probes))
    if given.json is not None:
        given.json.write_text(json.dumps(_for_file(report, probes), indent=1) + "\n")
    return 1 if report.bad() else 0


def _parsed(arguments: Sequence[str], probes: dict[str, Probe]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m xla_dtensor.debug.device",
        description="what a PJRT backend can do, by tiny programs on its devices, and which "
        "operations need what it can't",
    )
    parser.add_argument("--platform", help="cpu, gpu, tpu, neuron, ...; by default JAX's choice")
    parser.add_argument("--devices", type=int, metavar="N", help="so many simulated CPU devices")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each (60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it to a file")
    given = parser.parse_args(list(arguments))
    if given.devices is not None:
        if given.devices < 1 or given.platform not in (None, "cpu"):
            parser.error("--devices is a number of simulated devices, which the CPU alone has")
        given.platform = "cpu"
    if not 0 < given.timeout < math.inf:
        parser.error("--timeout is a number of seconds")
    unknown = [name for name in given.only or () if name not in probes]
    if unknown:
        parser.error(f"there is no {', '.join(map(repr, unknown))}, but {', '.join(probes)}")
    if given.json is not None and not given.json.parent.is_dir():
        parser.error(f"--json {given.json}: there is no folder {given.json.parent}")
    return given


def outcomes(
    names: Sequence[str], options: Options, report: DeviceReport
) -> Generator[Outcome, None, None]:
    """What becomes of probes, each as soon as it is known.

    Args:
        names: which.
        options: how they are run.
        report: is told of the backend.
    """
    waiting = list(names)
    while waiting:
        began = time.monotonic()
        with _child(waiting, options) as child:
            told, lost = child.line(max(_START, options.timeout))
            if told is None or "failed" in told:
                outcome = lost or Outcome("start", "failed", told["failed"] if told else "")
                yield Outcome("start", outcome.word, outcome.said, time.monotonic() - began)
                yield from (Outcome(n, "not run", "the backend doesn't start") for n in waiting)
                return
            report.backend = told["backend"]
            while waiting:
                began = time.monotonic()
                told, lost = child.line(options.timeout)
                if lost is None and told is not None and "start" in told:
                    told, lost = child.line(options.timeout)
                name = waiting.pop(0)
                seconds = time.monotonic() - began
                if lost is not None:
                    yield Outcome(name, lost.word, lost.said, seconds)
                    break
                assert told is not None and told["end"] == name
                yield Outcome(name, told["word"], told["said"], seconds)
            else:
                _, lost = child.line(_END)
                if lost is not None and lost.said != "(exit status 0)":
                    yield Outcome("end", lost.word, lost.said)


class _Child:
    """A process that runs probes, as this one sees it."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: int, said: Any) -> None:
        self.process, self._pipe, self._said = process, pipe, said
        self._buffer, self._logged = b"", 0

    def line(self, seconds: float) -> tuple[dict[str, Any] | None, Outcome | None]:
        """What it tells next, or how it was lost.

        Args:
            seconds: how long that may take.
        """
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None, Outcome("", "timed out", f"(killed after {seconds:g} s)")
            piece = os.read(self._pipe, 65536)
            if not piece:
                return None, Outcome("", "ended the process", self._last_words())
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        told = json.loads(line)
        self._logged = told.get("logged", self._logged)
        return told, None

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END)
        status = self.process.poll()
        if status is None:
            return "(it has closed its pipe and goes on)"
        if not status:
            return "(exit status 0)"
        how = f"(signal {-status})" if status < 0 else f"(exit status {status})"
        self._said.seek(self._logged)
        lines = [x for x in self._said.read().decode(errors="replace").splitlines() if x.strip()]
        # XLA's checks that fail are logged as fatal, with traces of the stack behind.
        fatal = [x for x in lines if re.match(r"F\d{4}|.*Check failed", x)]
        return f"{how}: {(fatal or lines)[-1].strip()[:300]}" if lines else how

    def kill(self) -> None:
        """End it, and whatever it has started."""
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


@contextlib.contextmanager
def _child(names: Sequence[str], options: Options) -> Iterator[_Child]:
    """A process that runs these probes, which has ended when the block is left."""
    command = [sys.executable, "-m", "xla_dtensor.debug._probe_child"]
    read, write = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, read)
        said = stack.enter_context(tempfile.TemporaryFile())
        try:
            process = subprocess.Popen(
                [*command, str(write), str(options.devices), options.path or "", *names],
                env=options.environment(),
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                pass_fds=(write,),
                # A group of its own: an interrupt of ours is for us, and a kill takes them all.
                start_new_session=True,
            )
        finally:
            os.close(write)
        child = _Child(process, read, said)
        stack.callback(child.kill)
        yield child


def _summary(report: DeviceReport, probes: dict[str, Probe]) -> str:
    lines = [""]
    if report.backend:
        about = report.backend
        lines += [
            f"{about['platform']}: {about['devices']} of {about['device_kind']!r}"
            f" ({about['version'] or 'of no version'})",
            f"JAX {about['jax']}, jaxlib {about['jaxlib']}, "
            f"plugins: {', '.join(about['plugins']) or 'none'}",
        ]
    counts = Counter(one.word for one in report.outcomes)
    lines += [", ".join(f"{count} {word}" for word, count in counts.items())]
    for one in report.bad():
        if one.name in probes and one.word != "not run":
            needed = ", ".join(probes[one.name].needed_by)
            lines += [f"  {one.name} ({one.word}) is needed by {needed}"]
    return "\n".join(lines)


def _for_file(report: DeviceReport, probes: dict[str, Probe]) -> dict[str, Any]:
    def entry(one: Outcome) -> dict[str, Any]:
        probe = probes.get(one.name)
        more = {"needed_by": probe.needed_by, "stands_for": probe.stands_for} if probe else {}
        return {**asdict(one), **more}

    return {"backend": report.backend, "probes": [entry(one) for one in report.outcomes]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
