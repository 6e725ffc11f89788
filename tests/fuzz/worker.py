"""The process that runs programs: it takes seeds from its input, and says what came of them.

It may die, and is started again by who reads that (`tests/fuzz/__main__.py`).

python -m tests.fuzz.worker
"""

from __future__ import annotations

import os
import sys

# XLA has much to say about layouts that nobody would choose, and nothing here is compiled twice.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ["XLA_DTENSOR_CHECKS"] = "eager"  # users' default, not the tests'

import tests.conftest  # isort: skip  (sets the environment: first)  # noqa: F401

import dataclasses
import json
import time
import warnings
from pathlib import Path
from typing import Any

import jax

import xla_dtensor as xd
from tests.fuzz import xla
from tests.fuzz.program import Program, on_cpu, unpacked
from tests.fuzz.run import WAYS, Failure, failures, run
from tests.fuzz.script import script
from tests.fuzz.seeds import draw
from tests.fuzz.shrink import shrunk
from xla_dtensor.execution import lazy, pieces
from xla_dtensor.runtime import live_programs

PROGRAMS = 600  # of XLA: more than a megabyte each
MEMORY = 3 * 2**30  # bytes; then the process ends


def main() -> None:
    warnings.simplefilter("ignore")
    jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody reads what was lowered
    # A few operations, too, are joined at once, and not when they come often.
    lazy.OFTEN = pieces.OFTEN = 0
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what XLA and JAX print isn't an answer
    for request in sys.stdin:
        asked = json.loads(request)
        started = time.process_time()
        answer = _shrunk(asked) if asked.get("shrink") else _run(asked)
        answer["seconds"] = time.process_time() - started
        answer["ends"] = _memory() > MEMORY
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer["ends"]:
            return
        if live_programs()[0] > PROGRAMS:
            jax.clear_caches()
            xd.debug.clear_caches()


def _memory() -> int:
    """What the process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _program(asked: dict[str, Any]) -> Program:
    if "program" in asked:
        return unpacked(asked["program"])
    return draw(asked["seed"], asked["mesh"])


def _run(asked: dict[str, Any]) -> dict[str, Any]:
    program = _program(asked)
    if "program" in asked:
        try:
            on_cpu(program)
        except Exception:  # CPU torch refuses what a shrinker has made of a program
            return {"failures": []}
    found = failures(program, asked.get("ways") or WAYS)
    return {"failures": [dataclasses.asdict(failure) for failure in found]}


def _shrunk(asked: dict[str, Any]) -> dict[str, Any]:
    """A smaller program with a failure, and its script."""
    failure = Failure(**asked["shrink"])

    def fails(program: Program) -> bool:
        return any(failure.same(other) for other in failures(program, [failure.way]))

    smaller = shrunk(_program(asked), fails, asked["within"])
    again = [other for other in failures(smaller, [failure.way]) if failure.same(other)]
    if not again:
        return {"script": None}
    text = script(smaller, again[0], asked["seed"])
    return {
        "script": text,
        "told": smaller.told(),
        "text": again[0].text,
        "blamed": _blamed(smaller, again[0], Path(asked["path"])),
    }


def _blamed(program: Program, failure: Failure, path: Path) -> str:
    """Whether XLA is at fault."""
    if failure.kind != "wrong":
        by_xla = failure.what in ("JaxRuntimeError", "XlaRuntimeError")
        return "XLA doesn't compile or run it" if by_xla else ""
    xd.debug.clear_caches()
    return xla.blamed(lambda: run(program, failure.way), path)


if __name__ == "__main__":
    main()
