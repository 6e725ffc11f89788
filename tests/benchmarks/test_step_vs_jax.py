"""The programs of the benchmark's models: what they move is known, and no more than JAX's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EXPECTED = json.loads((Path(__file__).parent / "collectives.json").read_text())

OF_THE_TESTS = ("XLA_FLAGS", "XLA_DTENSOR_CHECKS")  # which change the programs


def output(script: str, *arguments: str) -> Any:
    process = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments, "--json"],
        env={name: value for name, value in os.environ.items() if name not in OF_THE_TESTS},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1] if "diff" in script else process.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("model", EXPECTED["torch"])
def test_collectives(model: str) -> None:
    """A change here is to be made on purpose: ``python benchmarks/hlo_diff.py --model ...``."""
    found = output("hlo_diff.py", "--model", model)
    assert found["torch"]["bytes"] <= 1.02 * found["jax"]["bytes"]
    if jax.__version__ == EXPECTED["jax"]:
        assert found["torch"] == EXPECTED["torch"][model]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet", "moe"])
def test_both_sides_train_as_cpu_torch(model: str) -> None:
    result = output("step_vs_jax.py", "--model", model, "--rounds", "1", "--first-calls", "1")[
        model
    ]
    assert 0 <= result["torch"]["loss_difference"] <= 1e-4
    assert 0 <= result["jax"]["loss_difference"] <= 1e-4
    assert set(result["ratio"]) >= {"step_ms", "first_call_s", "collective_bytes"}
