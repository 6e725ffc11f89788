"""`benchmarks/on_gpu.py`, with a tiny model and without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import scripts


@pytest.mark.slow
def test_each_side_trains_the_same_model(tmp_path: Path) -> None:
    found = tmp_path / "found.jsonl"
    options = ["--programs", "1b", "--sides", "torch", "ours", "jax", "--rounds", "1"]
    scripts.output("on_gpu.py", "--device", "cpu", "--tiny", *options, "--json", str(found))
    rows = {row["side"]: row for row in map(json.loads, found.read_text().splitlines())}
    assert not any("failed" in row for row in rows.values()), rows
    expected = rows["torch"]["losses"]
    for side in ("ours", "jax"):
        assert rows[side]["losses"] == pytest.approx(expected, rel=1e-3), side
    assert rows["ours"]["planned_gib"] > 0 and rows["ours"]["step_ms"] > 0
