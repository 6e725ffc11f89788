"""The README's Python runs as it is written, top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parents[1] / "README.md"


def test_blocks_run(mesh_2x4: Any) -> None:
    names: dict[str, Any] = {"__name__": "readme"}
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    values = names["loss"].local_values()
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
    for text in (row, README.read_text()):
        said = re.search(
            r"\*\*([\d.]+ %)\*\* .*?pass\s+forward\s+and\s+\*\*([\d.]+ %)\*\* backward", text
        )
        assert said is not None
        assert said.groups() == (rates["float32", "forward"], rates["float32", "backward"])
    others = dict(re.findall(r"(bfloat16|int64|bool|complex64) ([\d.]+ %)", row))
    assert others == {dtype: rates[dtype, "forward"] for dtype in others} and len(others) == 4


def test_it_is_two_screens() -> None:
    assert len(README.read_text().splitlines()) <= 90
