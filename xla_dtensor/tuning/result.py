"""The result of `xd.tune`: the trials, and the best of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xla_dtensor.planning.text import milliseconds
from xla_dtensor.tuning.configuration import Configuration
from xla_dtensor.tuning.picture import picture
from xla_dtensor.tuning.trial import Trial


@dataclass(frozen=True)
class Tuned:
    """Configurations, the best first; `xd.tune` makes it, and ``str`` is a table.

    Attributes:
        topology: what they are for.
        trials: all that were looked at.
        notes: what to keep in mind.

    Example::

        import torch, xla_dtensor as xd

        def build(parallelize):
            model = parallelize(torch.nn.Linear(64, 64))
            def step(x):
                loss = model(x).square().mean()
                loss.backward()
                return loss.detach()
            return step

        found = xd.tune(build, (torch.ones(16, 64),), topology="cpu:8")
        step = xd.compile(build(found.best.apply))
        step(*found.best.place(torch.ones(16, 64)))
    """

    topology: str
    trials: Sequence[Trial]
    notes: Sequence[str] = ()

    @property
    def fits(self) -> bool:
        """Whether any of them has enough memory."""
        return any(trial.fits for trial in self.trials)

    @property
    def best(self) -> Configuration:
        """The first that fits.

        Raises:
            RuntimeError: none does; it says what comes nearest, and what it lacks.
        """
        found = next((trial for trial in self.trials if trial.fits), None)
        if found is None:
            raise RuntimeError(f"xd.tune: nothing fits on {self.topology}: {self.lacks()}")
        return found.configuration

    def lacks(self) -> str:
        """What comes nearest of those that don't fit, and what it lacks."""
        known = [trial for trial in self.trials if not trial.error]
        if not known:
            errors = {trial.error for trial in self.trials}
            return "; ".join(sorted(errors)) or "nothing was looked at"
        trial = min(known, key=lambda trial: trial.memory)
        have = "an unknown size" if trial.limit is None else _gib(trial.limit)
        return (
            f"{trial.configuration.describe()} needs {_gib(trial.memory)} on a device of {have}: "
            "take more devices or a smaller batch, or compute more of it again"
        )

    def table(self, count: int = 20) -> str:
        """The first so many, a line each: seconds of a step and who says so, what the chip's peak
        and the links allow at the least, memory and bytes of collectives on a device. Below it is
        said what these times have in them, and the notes."""
        head = ("", "step", "by", "at least", "memory", "moves", "configuration")
        rows = [head, *(self._row(i, t) for i, t in enumerate(self.trials[:count], 1))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
        lines = [
            "  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ]
        left = len(self.trials) - count
        more = [f"and {left} more"] if left > 0 else []
        timed = {t.known_by for t in self.trials[:count] if t.seconds is not None and not t.error}
        meant = [f"{who}: {what}" for who, what in _MEANT.items() if who in timed]
        return "\n".join([f"xd.tune for {self.topology}", *lines, *more, *meant, *self.notes])

    def _row(self, number: int, trial: Trial) -> tuple[str, ...]:
        report, estimate = trial.report, trial.estimate
        moved = estimate.moved if report is None else report.collective_bytes
        least = None if report is None else report.bound
        what = trial.configuration.describe()
        if trial.error:
            return (str(number), *["-"] * 5, f"{what}: {trial.error.splitlines()[0]}")
        if not trial.fits:
            what += ": doesn't fit"
        return (
            str(number),
            _time(trial.seconds),
            trial.known_by,
            _time(least),
            _gib(trial.memory),
            _gib(moved),
            what,
        )

    def __str__(self) -> str:
        return self.table()

    def as_json(self) -> str:
        """All of it; `from_json` reads it again."""
        trials = [trial.as_dict() for trial in self.trials]
        found = {"topology": self.topology, "trials": trials, "notes": [*self.notes]}
        return json.dumps(found, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Tuned:
        """What `as_json` has given.

        Raises:
            ValueError: it is something else.
        """
        try:
            found = json.loads(text)
            trials = [Trial.from_dict(each) for each in found["trials"]]
            return cls(found["topology"], tuple(trials), tuple(found["notes"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no result of xla_dtensor.tune: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write it to a file, by the ending of its name.

        Args:
            path: ``.json``; ``.txt``, the table; ``.py``, the best one as code; ``.png`` or
                ``.svg``, a picture of memory and time (needs matplotlib).

        Raises:
            ValueError: another ending.
        """
        path = Path(path)
        texts: dict[str, Any] = {
            ".json": self.as_json,
            ".txt": self.table,
            ".py": lambda: self.best.as_code(),
        }
        if path.suffix in texts:
            path.write_text(texts[path.suffix]())
        elif path.suffix in (".png", ".svg"):
            picture(self, path)
        else:
            raise ValueError(f"{path}: write .json, .txt, .py, .png or .svg")


_MEANT = {
    "compiler": "XLA's order of instructions, each at the peak of the chip, its memory and its "
    "links; no latencies",
    "estimate": "products, collectives and the optimizer's state after each other; not what else "
    "operations read and write, no latencies",
}
"""What a time has in it, by who says it."""


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else milliseconds(seconds)


def _gib(nbytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes / 2**10:.1f} KiB"
