"""The pictures of what benchmarks have kept."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from tests.launch import ROOT
from tests.site.tools import tool

plots = tool("plots")


def run(commit: str, **figures: Any) -> dict[str, Any]:
    return {
        "benchmark": "horovod",
        "commit": commit,
        "time": f"2026-01-0{commit[-1]}T00:00:00+00:00",
        "load": 1.25,
        "figures": figures,
    }


KEPT = [
    run("aaa1", horovod={"gloo_over_this": 1.5}, replicate={"gloo_over_this": 2.0}),
    run("bbb2", horovod={"gloo_over_this": 3.0}),
]


def test_a_point_for_each_figure() -> None:
    picture = ElementTree.fromstring(plots.drawn(plots.PLOTS[-1], KEPT))
    assert {child.tag for child in picture} == {"title", "path", "text", "polyline", "circle"}
    points = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in picture.iter("circle")]
    (x1, low), (x2, high), (x3, middle) = points
    assert x1 == x3 < x2 and high < middle < low  # 3 is above 2 is above 1.5
    labels = [element.text for element in picture.iter("title")]
    assert "hvd.DistributedOptimizer at bbb2 (2026-01-02): 3.00" in labels
    ones = [path for path in picture.iter("path") if path.get("stroke-dasharray") is None]
    assert len(ones) == 1  # where both take the same time


def test_benchmarks_without_runs_have_no_picture() -> None:
    text = plots.section(KEPT)
    assert text.count("<svg") == 1 and "horovod.py" in text and "step_vs_jax" not in text


def test_what_was_kept_is_drawn() -> None:
    """Every file that a benchmark has written is of one that is drawn, and has its numbers."""
    kept = plots.runs()
    known = {plot.benchmark: plot for plot in plots.PLOTS}
    for each in kept:
        plot = known[each["benchmark"]]
        assert any(plots._numbers([each], where) for where in plot.figures.values()), each
    assert plots.section().count("<circle") >= len(kept) >= 2
    for name in known:
        source = (ROOT / "benchmarks" / f"{name}.py").read_text()
        assert re.search(r"\brecord\(", source), f"{name}.py keeps nothing"
