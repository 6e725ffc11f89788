"""The benchmark of Horovod's API as a user runs it, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "horovod.py"
TINY = ("--dim=64", "--layers=1", "--batch=8", "--seq=32", "--rounds=1", "--steps=2", "--json")


@pytest.mark.slow
def test_all_sides_run_and_agree() -> None:
    process = subprocess.run(
        [sys.executable, SCRIPT, *TINY], capture_output=True, text=True, check=False, timeout=600
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert list(result) == ["gloo", "horovod", "replicate"]
    for side in result.values():
        assert 0 <= side["loss_difference"] <= 1e-4 and 0 < side["fastest_ms"] <= side["step_ms"]
    assert result["horovod"]["collectives"] == result["replicate"]["collectives"]
