"""The programs of the benchmark's models: what they move is known, and no more than JAX's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.benchmarks import scripts

EXPECTED = json.loads((Path(__file__).parent / "collectives.json").read_text())


def output(script: str, *arguments: str) -> Any:
    printed = scripts.output(script, *arguments, "--json")
    return json.loads(printed.splitlines()[-1] if "diff" in script else printed)


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
