"""Benchmarks' scripts in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OF_THE_TESTS = ("XLA_FLAGS", "XLA_DTENSOR_CHECKS")  # which change the programs


def output(script: str, *arguments: str) -> str:
    """What ``benchmarks/script`` prints."""
    process = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments],
        env={name: value for name, value in os.environ.items() if name not in OF_THE_TESTS},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
