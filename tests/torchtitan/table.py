"""The table of docs/torchtitan.md, and the runs that it is made of, which are kept: a table whose
making is stopped goes on."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import xla_dtensor as xd

HEAD = "| model | plan | steps | compiled | eager | recompiled |\n|---|---|---|---|---|---|"
ROOT = Path(__file__).parents[2]
# What a run's losses come from.
OF_TESTS = ("harness.py", "plan.py", "releases")
CODE = ("xla_dtensor", *(f"tests/torchtitan/{name}" for name in OF_TESTS))


@dataclasses.dataclass(frozen=True)
class Row:
    """A model with a plan.

    Attributes:
        model: as the table calls it.
        plan: as the table calls it.
        about: the plan's settings.
        limit: how far a loss may be from that of one process.
    """

    model: str
    plan: str
    about: Mapping[str, Any]
    limit: float


Measure = Callable[[Row, int, bool], tuple[float, int]]
"""Of a row, a number of steps and whether they are compiled: the largest difference between the
losses and those of one process, and how often the step was compiled again."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--compiled", action="store_true", help="leave the eager runs out")
    made.add_argument("--only", help="rows that contain this text")
    made.add_argument("--table", action="store_true", help="run nothing: print what is there")
    made.add_argument(
        "--records",
        type=Path,
        default=ROOT / ".cache/torchtitan.jsonl",
        help="the runs that have been made; those of this code aren't made again",
    )
    return made


def make(rows: Sequence[Row], measure: Measure, options: argparse.Namespace) -> int:
    """Make the runs that haven't been made, compiled ones first, and print the table.

    Args:
        rows: of the table.
        measure: makes a run.
        options: of ``parser``.

    Returns:
        the number of runs that are off.
    """
    rows = [row for row in rows if not options.only or options.only in f"{row.model}, {row.plan}"]
    records = _Records(options.records)
    for compiled in (True,) if options.compiled else (True, False):
        for row in rows:
            if compiled and row.about.get("checked"):  # a mode for running eagerly
                continue
            if options.table or records.of(row, options.steps, compiled):
                continue
            start = time.monotonic()
            difference, again = measure(row, options.steps, compiled)
            seconds = time.monotonic() - start
            records.add(row, options.steps, compiled, (difference, again, seconds))
            jax.clear_caches()
            xd.debug.clear_caches()  # the programs of all rows would be tens of GiB
            how = "compiled" if compiled else "eager"
            line = f"{row.model}, {row.plan}, {how}: {difference:.1e}, {seconds:.0f} s"
            print(line, file=sys.stderr, flush=True)
    print(HEAD)
    wrong = 0
    for row in rows:
        found = [records.of(row, options.steps, compiled) for compiled in (True, False)]
        cells = ["-" if run is None else f"{run['difference']:.1e}" for run in found]
        again = "-" if found[0] is None else found[0]["recompiled"]
        if any(found):
            print(
                "|", " | ".join([row.model, row.plan, str(options.steps), *cells, str(again)]), "|"
            )
        wrong += sum(run is not None and not run["difference"] < row.limit for run in found)
    return wrong


class _Records:
    """Runs, a line of JSON each."""

    def __init__(self, path: Path) -> None:
        self._path, self._code = path, _code()
        lines = path.read_text().splitlines() if path.exists() else []
        self._made = {_key(run["of"]): run for run in map(json.loads, lines)}

    def _of(self, row: Row, steps: int, compiled: bool) -> dict[str, Any]:
        about = dataclasses.asdict(row) | {"steps": steps, "compiled": compiled}
        return about | {"code": self._code}

    def of(self, row: Row, steps: int, compiled: bool) -> dict[str, Any] | None:
        """The run, if there is one of this code."""
        return self._made.get(_key(self._of(row, steps, compiled)))

    def add(self, row: Row, steps: int, compiled: bool, run: tuple[float, int, float]) -> None:
        """Keep a run."""
        of = self._of(row, steps, compiled)
        made = {"of": of, "difference": run[0], "recompiled": run[1], "seconds": run[2]}
        self._made[_key(of)] = made
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(made) + "\n")


def _key(of: dict[str, Any]) -> str:
    return json.dumps(of, sort_keys=True)


def _code() -> str:
    """The commit's, or the moment's where something has been changed since."""
    git = lambda *words: subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    if git("status", "--porcelain", "--", *CODE):
        return f"changed, {time.time()}"
    return " ".join(git("rev-parse", *(f"HEAD:{path}" for path in CODE)))
