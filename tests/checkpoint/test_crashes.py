"""A run that is killed while it saves goes on bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # each life compiles the same


def run_module(name: str, *arguments: Any, timeout: float) -> str:
    """What a module of the tests prints; its processes end with it."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", name, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "JAX_NUM_CPU_DEVICES": "4"} | CACHE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed = process.communicate(timeout=timeout)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed[-6000:]
    return printed


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "lives",
    [1, pytest.param(10, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)],
)
def test_killed_at_instants_of_saving(tmp_path: Path, lives: int) -> None:
    """Each life goes on from a checkpoint, and every step of all lives has the loss, and the bits
    of all state, of the run that nobody has killed."""
    printed = run_module("tests.checkpoint.crashes", tmp_path, lives, 7, timeout=60 + 30 * lives)
    assert f"{lives} kills" in printed
    expected = {e["step"]: e for e in log_of(tmp_path / "uninterrupted") if "step" in e}
    log = log_of(tmp_path / "killed")
    restored = [entry["restored"] for entry in log if "restored" in entry]
    assert len(restored) == lives + 1 and all(e["skipped"] == [] for e in log if "skipped" in e)
    assert restored[0] == 0 and all(a < b for a, b in itertools.pairwise(restored))
    found = [entry for entry in log if "step" in entry]
    assert {entry["step"] for entry in found} == set(expected)
    assert all(entry == expected[entry["step"]] for entry in found)
