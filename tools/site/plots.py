"""The figures that benchmarks have kept (`benchmarks/history`), as pictures of the site: SVG in the
page, in the colours of its theme.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HISTORY = Path(__file__).resolve().parents[2] / "benchmarks" / "history"


@dataclass(frozen=True)
class Plot:
    """What is drawn of a benchmark's runs.

    Attributes:
        benchmark: its file's name.
        title: what the numbers are; all are ratios, and 1 is drawn as a line.
        figures: for each line of the picture where its number is in a run's figures.
    """

    benchmark: str
    title: str
    figures: dict[str, tuple[str, ...]]


PLOTS = (
    Plot(
        "step_vs_jax",
        "The compiled step's time over that of the same step hand-written in JAX",
        {name: (name, "ratio", "step_ms") for name in ("llama", "resnet", "moe")},
    ),
    Plot(
        "vs_torch_dtensor",
        "The time of torch's DTensor in 8 processes over ours in one, FSDP and tensor parallelism",
        {"compiled": ("xla", "ratio"), "eager": ("eager", "ratio")},
    ),
    Plot(
        "serving",
        "The time of a token of the compiled decoding step over that of hand-written JAX",
        {
            f"{devices} devices, batch {batch}": (f"{devices}, {batch}", "torch", "ratio")
            for devices in (1, 4)
            for batch in (1, 64)
        },
    ),
    Plot(
        "horovod",
        "The time of torch's DistributedDataParallel in 8 processes over ours in one",
        {
            "hvd.DistributedOptimizer": ("horovod", "gloo_over_this"),
            "xd.replicate": ("replicate", "gloo_over_this"),
        },
    ),
)

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 190, 14, 40
_COLOURS = ("#3f51b5", "#e65100", "#2e7d32", "#ad1457")


def runs(folder: Path = HISTORY) -> list[dict[str, Any]]:
    """All runs that were kept, the oldest first."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(found, key=lambda run: run["time"])


def section(kept: Sequence[dict[str, Any]] | None = None) -> str:
    """Markdown with a picture for each of `PLOTS` that has runs."""
    kept = runs() if kept is None else kept
    lines = ["## History", ""]
    lines += [
        "Each run that was kept (`--record`), by its commit, with the load of the machine then."
    ]
    for plot in PLOTS:
        own = [run for run in kept if run["benchmark"] == plot.benchmark]
        if own:
            lines += ["", f"**`{plot.benchmark}.py`** {plot.title}:", "", drawn(plot, own)]
    return "\n".join(lines) + "\n"


def drawn(plot: Plot, kept: Sequence[dict[str, Any]]) -> str:
    """One picture, a point for each run that has a figure, from left to right."""
    lines = {name: _numbers(kept, where) for name, where in plot.figures.items()}
    lines = {name: points for name, points in lines.items() if points}
    top = 1.1 * max([1.0, *(y for points in lines.values() for _, y in points)])
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def across(i: int) -> float:
        return _LEFT + width * (i + 0.5) / len(kept)

    def up(value: float) -> float:
        return _TOP + height * (1 - value / top)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" style="width:100%;font-size:12px" '
        f'fill="currentColor"><title>{html.escape(plot.title)}</title>'
    ]
    for tick in _ticks(top):
        dashes = "" if tick == 1 else ' stroke-dasharray="2 4" stroke-opacity="0.5"'
        parts.append(
            f'<path d="M{_LEFT} {up(tick):.1f}H{_LEFT + width}" stroke="currentColor"{dashes}/>'
            f'<text x="{_LEFT - 6}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for i, run in enumerate(kept):
        label = f"{run['commit']}, {run['time'][:10]}, load {run['load']:.0f}"
        if len(kept) <= 6 or i % (len(kept) // 6 + 1) == 0:
            parts.append(
                f'<text x="{across(i):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
                f"{html.escape(run['commit'])}<title>{html.escape(label)}</title></text>"
            )
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{across(i):.1f},{up(y):.1f}" for i, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for i, y in points:
            label = f"{name} at {kept[i]['commit']} ({kept[i]['time'][:10]}): {y:.2f}"
            parts.append(
                f'<circle cx="{across(i):.1f}" cy="{up(y):.1f}" r="4" fill="{colour}">'
                f"<title>{html.escape(label)}</title></circle>"
            )
        where = _TOP + 14 + 18 * number
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 12}" y="{where}" fill="{colour}">'
            f"{html.escape(name)} {points[-1][1]:.2f}</text>"
        )
    return "".join([*parts, "</svg>"])


def _numbers(kept: Sequence[dict[str, Any]], where: Sequence[str]) -> list[tuple[int, float]]:
    """The runs that have a number there, by position, and the number."""
    found = []
    for i, run in enumerate(kept):
        value: Any = run["figures"]
        for key in where:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found.append((i, float(value)))
    return found


def _ticks(top: float) -> list[float]:
    step = next(s for s in (0.25, 0.5, 1, 2, 5, 10, 100) if top / s <= 6)
    return [i * step for i in range(int(top / step) + 1)]
