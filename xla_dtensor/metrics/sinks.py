"""Where metrics go: a file of JSON lines, TensorBoard's writer, wandb's run, any function."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger("xla_dtensor.metrics")

Sink = Callable[[Mapping[str, float], int], None]


def sink(where: Any) -> Sink:
    """A function that is given metrics and the step's number.

    Args:
        where: as of `xla_dtensor.metrics.to`.

    Raises:
        TypeError: it is none of these.
        ValueError: it is the name of a folder.
    """
    if isinstance(where, str | os.PathLike):
        return JsonLines(Path(where))
    add_scalar, log = getattr(where, "add_scalar", None), getattr(where, "log", None)
    if add_scalar is not None:

        def add_all(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                add_scalar(name, value, step)

        return add_all
    function = log if log is not None and not callable(where) else where
    if not callable(function):
        raise TypeError(
            f"xd.metrics.to({where!r}): give a file's name, an object with add_scalar "
            "(TensorBoard's SummaryWriter) or log (a run of wandb), or a function that is called "
            "with a dict of numbers and step="
        )

    def tell(values: Mapping[str, float], step: int) -> None:
        function(dict(values), step=step)

    return tell


class JsonLines:
    """A file with one JSON object in each line; lines are added to a file that is there. What is no
    finite number is null: JSON has no others.

    Args:
        path: of the file. Its folder is made.

    Raises:
        ValueError: it is a folder; or, when it is called, numbers have a name that each line has of
            its own.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise ValueError(
                f"xd.metrics.to({str(path)!r}): that is a folder; give a file's name, "
                f"{str(path / 'metrics.jsonl')!r} for example"
            )
        self._path, self._told = path, False
        path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, values: Mapping[str, float], step: int) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line: dict[str, float | None] = {"step": step, "time": round(time.time(), 3)}
        for name in line.keys() & numbers.keys():
            raise ValueError(f"after_step({name}=...): each line has a {name!r}; use another name")
        line |= numbers
        try:
            start = "\n" if _is_torn(self._path) else ""
            with self._path.open("a") as file:
                file.write(f"{start}{json.dumps(line)}\n")
        except OSError as error:  # a full disk doesn't end a training run
            if not self._told:
                _log.warning("metrics can't be written, and the run goes on: %s", error)
            self._told = True


def _is_torn(path: Path) -> bool:
    """Whether a file ends in the middle of a line: a run that was killed, or a full disk, has left
    a part of one."""
    if not path.is_file() or not path.stat().st_size:  # a pipe has no end to look at
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
