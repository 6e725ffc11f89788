"""The README's Python runs as it is written, top to bottom."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parents[1] / "README.md"
BENCHMARKS = README.parent / "benchmarks" / "README.md"


def test_blocks_run(mesh_2x4: Any) -> None:
    names: dict[str, Any] = {"__name__": "readme"}
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
        lines = [line for line in block.splitlines() if line]
        assert len(lines) <= 15
    batch = names["xd"].from_device_values(list(torch.randn(2, 4, 16)), names["mesh"]["dp"])
    values = names["train_step"](batch).local_values()
    torch.testing.assert_close(values[0], values[3])
    assert not torch.equal(values[0], values[4])  # another batch


def test_rates_are_the_reports() -> None:
    """What README and table say of torch's op_db is what its last run has said."""
    report = (README.parent / "tests" / "conformance" / "REPORT.md").read_text()
    rates = {
        (dtype, form): rate
        for dtype, rows in re.findall(r"^## (\w+) on 2x4\n(.*?)(?=^## |\Z)", report, re.M | re.S)
        for form, rate in re.findall(r"^\| (\w+) \| \d+ \| \d+ \| ([\d.]+ %) \|", rows, re.M)
    }
    features = (README.parent / "docs" / "features.md").read_text()
    (row,) = re.findall(r"^\| operations \|.*$", features, re.MULTILINE)
    said = re.search(r"\*\*([\d.]+ %)\*\* .*?pass forward and \*\*([\d.]+ %)\*\* backward", row)
    assert said is not None
    assert said.groups() == (rates["float32", "forward"], rates["float32", "backward"])
    assert f"`op_db`, torch's own list of operations with test cases, **{said[1]}** pass" in (
        README.read_text()
    )
    others = dict(re.findall(r"(bfloat16|int64|bool|complex64) ([\d.]+ %)", row))
    assert others == {dtype: rates[dtype, "forward"] for dtype in others} and len(others) == 4


def section(page: Path, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    assert found is not None
    return found[1]


def test_there_are_three_figures_and_each_is_its_tables() -> None:
    said = re.findall(r"\*\*(\d[\d.]*(?: %)?)\*\*", section(README, "What it does better"))
    rest = re.sub(r"\*\*\d.*?\*\*", "", section(README, "What it does better"))
    assert len(said) == 3 and not re.search(r"\d", rest)  # the third: `test_rates_are_the_reports`
    steps = section(
        BENCHMARKS, "`step_vs_jax.py`: the compiled torch step against a hand-written JAX step"
    )
    (llama,) = re.findall(r"^\| step, median \| [^|]*\*\*([\d.]+)\*\* \|", steps, re.M)
    sweep = section(BENCHMARKS, "`layout_sweep.py`: what a step moves, layout by layout")
    rows = [row.split("|") for row in re.findall(r"^\| cpu \|.*$", sweep, re.M)]
    ratio = statistics.median(float(row[9].strip(" *")) for row in rows)
    assert len(rows) > 200 and said[:2] == [llama, f"{ratio:.2f}"]


def test_it_is_two_screens() -> None:
    assert len(README.read_text().splitlines()) <= 72
