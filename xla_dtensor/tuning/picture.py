"""The results of `xd.tune` as a picture: memory against time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLOURS = {"measured": "#2f6f4e", "compiler": "#3b6ea5", "estimate": "#b0b7bf"}


def picture(tuned: Any, path: Path) -> None:
    """Draw a `Tuned`: each configuration that can be compared, those that nothing beats in both
    joined by a line, and the memory that there is.

    Args:
        path: where to, ``.png`` or ``.svg``.

    Raises:
        ValueError: nobody knows how long any of them takes.
    """
    from matplotlib.figure import Figure

    known = [trial for trial in tuned.trials if trial.seconds is not None and not trial.error]
    if not known:
        raise ValueError(
            f"{path}: nobody knows how long a step takes on {tuned.topology}; .txt has the table"
        )
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for kind, colour in _COLOURS.items():
        own = [trial for trial in known if trial.known_by == kind]
        if own:
            x = [trial.memory / 2**30 for trial in own]
            y = [1000 * trial.seconds for trial in own]
            axes.scatter(x, y, color=colour, label=f"time by {kind}")
    front = pareto([(trial.memory, trial.seconds) for trial in known])
    axes.plot([m / 2**30 for m, _ in front], [1000 * s for _, s in front], color="#888", lw=1)
    for number, trial in enumerate(known[:10], 1):
        place = trial.memory / 2**30, 1000 * trial.seconds
        sizes = " ".join(f"{name}={size}" for name, size in trial.configuration.mesh.items())
        text = f"{number} {sizes}"
        axes.annotate(text, place, fontsize=7, xytext=(4, 3), textcoords="offset points")
    limit = known[0].limit
    if limit is not None:
        axes.axvline(limit / 2**30, color="#a33", ls="--", lw=1, label="memory there is")
    axes.set(xlabel="GiB on a device", ylabel="ms a step", title=f"xd.tune for {tuned.topology}")
    axes.legend(fontsize=8)
    figure.savefig(path)


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of which no other has less of both, by the first."""
    found: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found
