"""`to`: measures a training run, and tells what it has found every few steps."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xla_dtensor.base.tables import counters
from xla_dtensor.compilation import CompiledStep
from xla_dtensor.metrics.sinks import sink
from xla_dtensor.planning.planner import report_of
from xla_dtensor.runtime import memory, processes
from xla_dtensor.runtime.chips import chip_of
from xla_dtensor.runtime.jax_runtime import own_device

_COUNTS = ("traces", "compilations", "recompilations")
_SECONDS = {
    "compile/seconds": "compile",
    "checkpoint/seconds": "checkpoint",
    "checkpoint/writing_seconds": "checkpoint writing",
}


def to(where: Any, step: Any = None, *, every: int = 10, tokens: int | None = None) -> Metrics:
    """Measure a training run, and tell every few steps how it goes.

    Args:
        where: the name of a file, which gets a line of JSON each time; TensorBoard's
            ``SummaryWriter``; a run of wandb; or a function that is called with a dict of numbers
            and ``step=``, as ``wandb.log`` is. Of several processes the first one tells.
        step: the compiled step (`xla_dtensor.compile`), of whose programs operations and
            communication are known; None to go without these.
        every: after how many steps. The devices are waited for then, and not in between.
        tokens: how many a call of `after_step` stands for; by default what the step's program has
            as its largest argument of integers, or the length of its first argument.

    Returns:
        a `Metrics`.

    Raises:
        TypeError: ``where`` is none of these, or ``step`` isn't compiled.
        ValueError: ``every`` is no whole number from 1 on, or ``where`` the name of a folder.

    Example::

        import torch, xla_dtensor as xd
        told = {}
        step = xd.compile(lambda x: (x @ x).sum())
        with xd.metrics.to(lambda values, step: told.update(values), step, every=2) as metrics:
            for number in range(1, 5):
                loss = step(torch.ones(64, 64, device="xla"))
                metrics.after_step(number, loss=loss)
        assert told["loss"] == 64**3 and told["step/tflops"] > 0 and told["compile/traces"] > 0
    """
    return Metrics(where, step, every=every, tokens=tokens)


class Metrics:
    """What a run has done since the last time it was told; `to` makes it, with its arguments.

    These are the numbers, of the mean step since then where nothing else is said:

    =============================== ==========================================================
    ``step/seconds``                without compilations, checkpoints and what was put `aside`
    ``step/tokens_per_second``      of all devices together
    ``step/tflops``                 operations of products and convolutions, per device and
                                    second, in 10**12
    ``step/mfu``                    the part of the chips' peak that this is, where it is known
    ``step/communicated_megabytes`` what collectives give a device
    ``step/exposed_seconds``        how long a device waits for them, by XLA's order of
                                    instructions, where the chip is known
    ``compile/...``                 ``traces``, ``compilations``, ``recompilations``: all so far;
                                    ``seconds``: all since the last time
    ``checkpoint/seconds``          how long the loop has waited for checkpoints since then;
                                    ``checkpoint/writing_seconds``: beside the loop
    ``memory/device_megabytes``     in use on the device with the most; ``_peak``: at most so far
    ``memory/host_megabytes``       of the process
    ``aside/NAME_seconds``          in blocks of `aside` since then
    =============================== ==========================================================

    Example::

        import torch, xla_dtensor as xd
        told = {}
        metrics = xd.metrics.to(lambda values, step: told.update(values, number=step), every=4)
        for number in range(1, 7):
            loss = torch.ones(8, device="xla").sum()
            metrics.after_step(number, loss=loss)
            with metrics.aside("evaluation"):
                loss.item()
        metrics.close()
        assert told["number"] == 6 and told["loss"] == 8 and told["aside/evaluation_seconds"] > 0
    """

    def __init__(self, where: Any, step: Any, *, every: int, tokens: int | None) -> None:
        if step is not None and not isinstance(step, CompiledStep):
            raise TypeError(
                f"xd.metrics.to(step={step!r}): give what xd.compile has returned; a replayed step "
                "or plain Python has no programs that could be looked at: leave it out"
            )
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"xd.metrics.to(every={every}): give a whole number, 1 or more")
        self._sink, self._step, self._every, self._tokens = sink(where), step, every, tokens
        self._reports = weakref.WeakKeyDictionary[Any, _Report]()
        self._values: dict[str, Any] = {}
        self._number: int | None = None
        self._open: list[str] = []
        self._begin_window()

    def after_step(self, number: int, **values: Any) -> None:
        """Say that a step has been done. Of a step that isn't told nothing is read.

        Args:
            number: of the step, for the reader.
            values: what else to tell: numbers, or tensors of one, such as the loss. Those of the
                last step are told.

        Raises:
            TypeError: a value is neither a number nor a tensor.
            ValueError: a tensor has more than one element.
        """
        self._number, self._values = number, values
        self._steps += 1
        if self._steps >= self._every:
            self._tell()

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """The block, an evaluation for example, isn't part of a step: neither its time nor what the
        step's programs do in it. Of blocks in blocks each has the time that no inner one has.

        Args:
            name: under which its seconds are told.
        """
        self._look()
        self._open.append(name)
        try:
            yield
        finally:
            self._look()
            self._open.pop()

    def close(self) -> None:
        """Tell what is left."""
        if self._steps:
            self._tell()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()

    # --- internals ---------------------------------------------------------------------------

    def _begin_window(self) -> None:
        self._before = {name: counters.seconds(name) for name in _SECONDS.values()}
        self._aside: defaultdict[str, float] = defaultdict(float)
        self._runs: Counter[Any] = Counter()
        self._seconds, self._steps = 0.0, 0
        self._looked = self._now()

    def _look(self) -> None:
        """Give what has been since the last look to the steps, or to the innermost block that is
        open: the time, less what this thread has compiled and saved in it, and programs' runs."""
        memory.synchronize()
        before, now = self._looked, self._now()
        self._looked = now
        # Of another thread than the last time it isn't known when it compiled.
        waited = now.waited - before.waited if now.thread == before.thread else 0.0
        taken = now.time - before.time - waited
        if self._open:
            self._aside[self._open[-1]] += taken
            return
        self._seconds += taken
        # What the step has no longer has run, too.
        for program in before.runs.keys() | now.runs.keys():
            self._runs[program] += program.runs - before.runs.get(program, 0)

    def _now(self) -> _Look:
        programs = [] if self._step is None else self._step.programs()
        return _Look(
            thread=threading.get_ident(),
            time=time.monotonic(),
            waited=counters.own_seconds("compile", "checkpoint"),
            runs={program: program.runs for program in programs},
        )

    def _tell(self) -> None:
        own = {name: _number(name, value) for name, value in self._values.items()}
        self._look()
        found = {**own, "step/seconds": self._seconds / self._steps, **self._of_programs()}
        found |= {f"compile/{name}": counters.total(name) for name in _COUNTS}
        found |= {
            **{key: counters.seconds(name) - self._before[name] for key, name in _SECONDS.items()},
            **{f"aside/{name}_seconds": taken for name, taken in self._aside.items()},
            **_memory(),
        }
        assert self._number is not None
        if processes.index() == 0:
            self._sink(found, self._number)
        self._values = {}
        self._begin_window()

    def _of_programs(self) -> dict[str, float]:
        """What the step's programs have done in the steps."""
        done, seconds = _Done(), self._seconds
        for program, runs in self._runs.items():
            if runs:
                report = self._reports.get(program)
                if report is None:
                    report = self._reports[program] = _Report(self._step, program)
                report.add(runs, done)
        if self._tokens is not None:
            done.tokens = self._tokens * self._steps
        found: dict[str, float] = {}
        if done.tokens is not None and seconds:
            found["step/tokens_per_second"] = done.tokens / seconds
        if done.runs and seconds:
            found["step/tflops"] = done.operations / seconds / 1e12
            found["step/communicated_megabytes"] = done.moved / self._steps / 1e6
            if done.of_peak is not None:
                found["step/mfu"] = done.of_peak / seconds
            if done.exposed is not None:
                found["step/exposed_seconds"] = done.exposed / self._steps
        return found


@dataclass(frozen=True)
class _Look:
    """How things were at one time.

    Attributes:
        thread: that looked.
        time: when.
        waited: how long that thread had compiled and saved.
        runs: how often the step's programs had run.
    """

    thread: int
    time: float
    waited: float
    runs: dict[Any, int]


@dataclass
class _Done:
    """What programs have done: None where of one of them it isn't known.

    Attributes:
        runs: how often they have run.
        tokens: that they were given.
        operations: of each device.
        moved: bytes that collectives give a device.
        of_peak: the seconds that the operations would have taken at the chip's peak.
        exposed: the seconds that a device has waited for collectives.
    """

    runs: int = 0
    tokens: float | None = 0
    operations: float = 0
    moved: float = 0
    of_peak: float | None = 0
    exposed: float | None = 0


class _Report:
    """What a program does each time."""

    def __init__(self, step: Any, program: Any) -> None:
        report, frame = report_of(step, program), program.frame
        device = own_device() if frame is None else frame.jax_mesh.devices.flat[0]
        chip = chip_of(device.platform, device)
        self._tokens, self._moved = report.tokens, report.collective_bytes
        self._operations = report.flops / report.chips
        self._of_peak = None if chip is None else self._operations / (chip.flops / chip.devices)
        self._exposed = None if report.scheduled is None else sum(report.exposed.values())

    def add(self, runs: int, done: _Done) -> None:
        """Add what so many runs do."""
        done.runs += runs
        done.operations += runs * self._operations
        done.moved += runs * self._moved
        done.tokens = _sum(done.tokens, runs, self._tokens)
        done.of_peak = _sum(done.of_peak, runs, self._of_peak)
        done.exposed = _sum(done.exposed, runs, self._exposed)


def _sum(before: float | None, runs: int, each: float | None) -> float | None:
    return None if before is None or each is None else before + runs * each


def _number(name: str, value: Any) -> float:
    """A value as JSON and TensorBoard take it."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"after_step({name}=...): a tensor of shape {tuple(value.shape)}; give one of one "
                "element, its mean for example"
            )
        value = value.detach()
        value = value.full_tensor().item() if hasattr(value, "full_tensor") else value.item()
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"after_step({name}={value!r}): give a number, or a tensor of one element")
    return float(value)


def _memory() -> dict[str, float]:
    stats = memory.stats()
    found = {
        "memory/device_megabytes": stats["allocated_bytes.all.current"] / 1e6,
        "memory/device_megabytes_peak": stats["allocated_bytes.all.peak"] / 1e6,
    }
    pages = Path("/proc/self/statm")  # of Linux
    if pages.exists():
        resident = int(pages.read_text().split()[1]) * resource.getpagesize()
        found["memory/host_megabytes"] = resident / 1e6
    return found
