"""What `xd.tune` finds moves what the best layout of the sweep does."""

from __future__ import annotations

import pytest

from tests.benchmarks import scripts


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "fused", "moe"])
def test_bytes_are_the_least_of_the_sweeps(model: str) -> None:
    """Of devices that nobody knows the bytes count, and nothing else."""
    row = scripts.output("tuned.py", "--models", model).strip().splitlines()[-1]
    name, _, moved, _, least, _, looked_at, _ = (cell.strip() for cell in row.strip("|").split("|"))
    assert name == model and int(looked_at) >= 24
    assert float(moved) <= 1.05 * float(least)
