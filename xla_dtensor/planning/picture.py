"""A report as a picture: memory, times and collectives as bars, and the schedule as a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xla_dtensor.planning.text import alike


def picture(report: Any, path: Path) -> None:
    """Draw a report.

    Args:
        report: what to draw.
        path: where it goes, a PNG or an SVG by its suffix.

    Raises:
        ImportError: matplotlib isn't installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a report as a picture needs matplotlib: pip install matplotlib, or save it as .json"
        ) from error
    strips = _strips(report)
    figure = Figure(figsize=(11, 7 + len(strips)), layout="constrained")
    mesh = ", ".join(f"{name}={size}" for name, size in report.mesh.items())
    figure.suptitle(", ".join(filter(None, (report.step, report.topology, mesh))))
    heights = (1, 2, *[0.45] * len(strips))
    parts: Any = figure.subfigures(2 + len(strips), 1, height_ratios=heights)
    top, bottom, *others = parts
    for part, stretch in zip(others, strips, strict=True):
        _timeline(part.subplots(), stretch, list(report.mesh))
    left, *more = top.subplots(1, 1 + bool(report.seconds), squeeze=False)[0]
    _memory(left, report)
    for right in more:  # of chips whose speed is known
        right.barh(list(report.seconds), [1e3 * v for v in report.seconds.values()])
        right.invert_yaxis()
        right.set_xlabel("ms at the least")
    rows = alike(report.collectives)[:16]
    axes = bottom.subplots()
    labels = [
        f"{row.kind} {'+'.join(row.dims)} {row.module or '?'} {row.part}".strip() for row in rows
    ]
    colors = ["tab:red" if row.activations else "tab:blue" for row in rows]
    axes.barh(range(len(rows)), [row.bytes / 1e6 for row in rows], color=colors)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("MB on one device (red: activations along the batch)")
    figure.savefig(path)


MOST_STRETCHES = 4


def _strips(report: Any) -> list[Any]:
    """The parts of the schedule that take longest, a loop's body as often as it runs."""
    by_time = sorted(report.stretches, key=lambda s: -s.seconds * s.times)
    return by_time[:MOST_STRETCHES]


def _timeline(axes: Any, stretch: Any, dims: list[str]) -> None:
    """What a device computes, and what is communicated meanwhile, in time. What it waits
    for is red."""
    lanes = ["compute", *dims]
    for event in stretch.events:
        start, seconds = 1e3 * event.start, 1e3 * event.seconds
        if event.what == "compute":
            axes.broken_barh([(start, seconds)], (0, 0.8), color="tab:gray")
            continue
        for dim in event.dims:
            place = lanes.index(dim) if dim in lanes else 0
            axes.broken_barh([(start, seconds)], (place, 0.8), color="tab:blue")
            waited = 1e3 * event.exposed
            if waited:
                span = [(start + seconds - waited, waited)]
                axes.broken_barh(span, (place, 0.8), facecolor="tab:red")
    axes.set_yticks([i + 0.4 for i in range(len(lanes))], lanes, fontsize=8)
    axes.invert_yaxis()
    times = f" x {stretch.times}" if stretch.times > 1 else ""
    axes.set_title(f"{stretch.name}{times} (red: waited for)", fontsize=8, loc="left")
    axes.set_xlabel("ms", fontsize=8)


def _memory(axes: Any, report: Any) -> None:
    memory, start = report.memory, 0.0
    parts = {
        "arguments": memory.arguments,
        "temporaries": memory.temporaries,
        "outputs": None if memory.outputs is None else memory.outputs - (memory.aliased or 0),
    }
    if memory.arguments is None:
        parts = {"needed": memory.needed}
    for name, value in parts.items():
        axes.barh(["memory"], [(value or 0) / 2**30], left=start, label=name)
        start += (value or 0) / 2**30
    if memory.available is not None:
        axes.axvline(memory.available / 2**30, color="black", linestyle="--")
    axes.legend(fontsize=8)
    axes.set_xlabel("GiB on one device")
