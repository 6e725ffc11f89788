"""The benchmark against torch's DTensor as a user runs it, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vs_torch_dtensor.py"
TINY = ("--dim=64", "--layers=1", "--batch=4", "--seq=32", "--rounds=1", "--steps=2")
# The script's main() after its tolerance was set to less than rounding.
STRICT = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
sys.argv[0] = {str(SCRIPT)!r}
import vs_torch_dtensor
vs_torch_dtensor.TOLERANCE = -1.0
vs_torch_dtensor.main()
"""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.slow
def test_both_sides_run_and_agree() -> None:
    process = run(SCRIPT, *TINY, "--eager", "--json")
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert 0 <= result["loss_difference"] <= 1e-4
    for side in ("gloo", "xla", "eager"):
        assert 0 < result[side]["fastest_ms"] <= result[side]["step_ms"]
    for side in ("xla", "eager"):
        assert 0 < result[side]["ratio_lowest"] <= result[side]["ratio"]
    assert result["xla"]["collectives"]["reduce-scatter"] > 0  # of fully_shard's gradients


@pytest.mark.slow
def test_different_losses_fail() -> None:
    process = run("-c", STRICT, *TINY)
    assert process.returncode == 1
    assert "differ from gloo's" in process.stderr, process.stderr


@pytest.mark.slow
def test_a_size_that_does_not_divide_is_refused() -> None:
    process = run(SCRIPT, "--batch=3")
    assert process.returncode == 2
    assert "--batch of 2" in process.stderr
