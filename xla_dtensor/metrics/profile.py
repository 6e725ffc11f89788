"""`profile`: where the devices' time goes, by module, from JAX's profiler."""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from xla_dtensor.base.source_line import module_in, of_equal_layers
from xla_dtensor.compilation import CompiledStep
from xla_dtensor.planning.program_text import HloText, Instruction
from xla_dtensor.runtime import memory

# What runs other instructions, whose own times are there, too.
_OUTER = ("while", "conditional", "call", "async-start", "async-done")
_PRODUCTS = ("dot", "convolution")
MOST = 40
"""Lines of a table."""


@dataclass(frozen=True)
class ProfileRow:
    """What devices have done for one module.

    Attributes:
        module: equal layers together (``layers.*.wq``); "" for what is in none.
        part: ``"forward"``, ``"backward"``, ``"optimizer"`` or "".
        operation: XLA's, ``"dot"``, ``"fusion"``, ``"all-reduce"``.
        times: how many ran, on all devices of this process.
        seconds: that they took, all together.
    """

    module: str
    part: str
    operation: str
    times: int
    seconds: float


class Profile:
    """What the devices of this process did in a block; `profile` makes it, and ``str`` is a table.

    Attributes:
        folder: JAX's trace, which TensorBoard and xprof read, or None where nobody asked for it.
        rows: those that took longest first.

    Example::

        import torch, xla_dtensor as xd
        step = xd.compile(lambda x: x @ x)
        x = torch.ones(64, 64, device="xla")
        y = step(x)
        with xd.metrics.profile(step) as profile:
            y = step(x)
        assert profile.seconds == sum(row.seconds for row in profile.rows) > 0
        assert [row.times for row in profile.rows if row.operation == "dot"] == [1]
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.rows: list[ProfileRow] = []

    @property
    def seconds(self) -> float:
        """Of all instructions of the steps' programs, on all devices of this process."""
        return sum(row.seconds for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{'ms':>9} {'%':>5} {'times':>6}  module, operation"]
        for row in self.rows[:MOST]:
            part = f" ({row.part})" if row.part == "backward" else ""
            share = 100 * row.seconds / self.seconds if self.seconds else 0.0
            name = f"{row.module or '(no module)'}{part} {row.operation}"
            lines.append(f"{1e3 * row.seconds:9.2f} {share:5.1f} {row.times:6}  {name}")
        if len(self.rows) > MOST:
            lines.append(f"... and {len(self.rows) - MOST} rows more")
        lines.append(f"{1e3 * self.seconds:9.2f} ms on all devices of this process together")
        return "\n".join(lines)


@contextlib.contextmanager
def profile(*steps: CompiledStep, folder: str | Path | None = None) -> Iterator[Profile]:
    """Run a block under JAX's profiler, and say how long the devices have taken for each module.
    Where the block begins and ends those arrays are waited for that somebody has: the program of a
    call whose results are all dropped may not be in it, or, called before the block, may be.

    Args:
        steps: compiled steps that run in the block, and have run before it (a compilation would be
            in the profile).
        folder: where JAX's trace is to stay; by default it is removed.

    Returns:
        a context manager of a `Profile`, which is filled when the block ends.

    Raises:
        TypeError: a step isn't a compiled one.

    Example::

        import torch, xla_dtensor as xd
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)).to("xla")
        step = xd.compile(lambda x: model(x).square().mean())
        x = torch.randn(512, 64, device="xla")
        y = step(x)
        with xd.metrics.profile(step) as profile:
            losses = [step(x) for _ in range(3)]
        print(profile)
        assert any(row.module == "0" for row in profile.rows) and profile.seconds > 0
    """
    for step in steps:
        if not isinstance(step, CompiledStep):
            raise TypeError(f"xd.metrics.profile({step!r}): give what xd.compile has returned")
    with contextlib.ExitStack() as stack:
        where = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        found = Profile(None if folder is None else where)
        memory.synchronize()
        with jax.profiler.trace(str(where)):
            yield found
            memory.synchronize()
        latest = max(where.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        found.rows = _rows(latest, _instructions(steps))


def _instructions(steps: tuple[CompiledStep, ...]) -> dict[str, tuple[str, str, str]]:
    """By the name of an instruction what it is for: module, part, operation."""
    found: dict[str, tuple[str, str, str]] = {}
    for program in (program for step in steps for program in step.programs()):
        text = HloText(program.executable.compiled.as_text())
        for instructions in text.computations.values():
            for one in instructions:
                heavy = _product(one, text)
                module, part = module_in(heavy.op_name)
                found[one.name] = of_equal_layers(module), part, heavy.op
    return found


def _product(one: Instruction, text: HloText) -> Instruction:
    """The product in a fusion, which takes its time; itself if there is none."""
    if one.op == "fusion":
        for _, name in one.calls():
            for inner in text.computations.get(name, ()):
                if inner.op in _PRODUCTS:
                    return inner
    return one


def _rows(trace: Path, instructions: dict[str, tuple[str, str, str]]) -> list[ProfileRow]:
    times: dict[tuple[str, str, str], int] = defaultdict(int)
    seconds: dict[tuple[str, str, str], float] = defaultdict(float)
    for event in _events(jax.profiler.ProfileData.from_file(str(trace))):
        name = dict(event.stats).get("hlo_op")
        key = instructions.get(name) if isinstance(name, str) else None
        if key is None or event.name.startswith("end: ") or key[2] in _OUTER:
            continue
        times[key] += 1
        seconds[key] += event.duration_ns / 1e9
    rows = [ProfileRow(*key, times[key], taken) for key, taken in seconds.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def _events(data: Any) -> Iterator[Any]:
    for plane in data.planes:
        for line in plane.lines:
            yield from line.events
