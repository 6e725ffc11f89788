"""The pool's processes come to the same loss in all three ways, or the benchmark fails itself."""

from __future__ import annotations

import pytest

from tests.benchmarks import scripts


@pytest.mark.slow
def test_three_ways() -> None:
    output = scripts.output("warm_pool.py", "--runs", "1", "--layers", "1")
    assert [line.split()[0] for line in output.splitlines()] == ["compiled", "loaded", "warm"]
