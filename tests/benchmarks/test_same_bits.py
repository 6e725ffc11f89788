"""A training has the same bits in one process and in several."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import output


@pytest.mark.slow
@pytest.mark.parametrize(("model", "counts"), [("moe", "124"), ("resnet", "14"), ("llama", "12")])
def test_in_processes(model: str, counts: str) -> None:
    layout = "2x4, weights over both"
    arguments = ("--steps", "3", "--models", model, "--layouts", layout)
    printed = output("same_bits.py", *arguments, "--processes", *counts)
    assert [row.split(" | ")[:4] for row in printed.splitlines()[2:]] == [
        [f"| {model}", layout, count, "the same"] for count in counts
    ]
