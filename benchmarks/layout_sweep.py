"""What a training step moves, layout by layout, next to the same step in JAX.

    python benchmarks/layout_sweep.py --models gpt fused --layouts tp fsdp0 --meshes 2x4

Models in plain torch, whose weights `distribute_tensor` lays out and of whose activations nothing
is said; and their twins in JAX with the same layouts of weights, batch and optimizer state, left
alone and written by an expert (`sweep/`). Each step (forward, backward, AdamW) is compiled for
simulated devices, its losses are compared with CPU torch's, and what its program does is read from
it. Nothing is timed. ``--compile-for v5e:4x4`` compiles for TPUs that aren't here (libtpu), where
nothing runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# With fewer threads, XLA's simulated CPU devices can deadlock waiting for one another.
os.environ["NPROC"] = "64"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # what XLA cannot do well is what is measured

import jax
from sweep.layouts import LAYOUTS, MESHES, on_mesh
from sweep.measure import OURS, SIDES, measure
from sweep.models import MODELS

LIMIT = 1.05  # a ratio above it counts as worse
WORST = 10  # rows that are listed
Row = dict[str, Any]

FIGURES = {"bytes": (1e6, ".2f"), "us": (1, ".0f"), "temporaries": (1e6, ".1f")}
"""What is printed of each side, its unit, and how."""


def ratio(row: Row, key: str, side: str = OURS[0]) -> float:
    """One of ours over the better twin's.

    Args:
        row: as `sweep.measure.measure` gives it.
        key: of `sweep.measure.figures`.
        side: which of ours.
    """
    best = min(row["alone"][key], row["expert"][key])
    ours = row[side][key]
    return float(ours / best) if best else math.inf if ours else 1.0


def selected(models: Sequence[str], layouts: Sequence[str], mesh: str) -> list[tuple[str, str]]:
    """The models and layouts of a mesh that make sense together."""
    return [
        (model, layout)
        for model in models
        for layout in on_mesh(layouts, mesh)
        if layout in MODELS[model].layouts
    ]


def key(row: Row) -> tuple[str, ...]:
    """What a row is of."""
    return tuple(row[name] for name in ("target", "mesh", "model", "layout"))


def line(row: Row) -> str:
    """A row as it is printed."""
    name = " ".join(key(row))
    if "error" in row:
        return f"{name}: ERROR {row['error']}"
    parts = []
    for figure, (unit, form) in FIGURES.items():
        values = ", ".join(format(row[side][figure] / unit, form) for side in SIDES)
        ratios = ", ".join(f"{ratio(row, figure, side):.2f}" for side in OURS)
        parts.append(f"{figure} {values} ({ratios})")
    parts.append(f"collectives {', '.join(str(row[side]['count']) for side in SIDES)}")
    parts.append(f"flops ({ratio(row, 'flops'):.2f})")
    return f"{name}: {'; '.join(parts)}"


def table(rows: Sequence[Row]) -> str:
    """The rows in markdown, in megabytes per device and step."""
    lines = [
        "| target | mesh | model | layout | whole step, MB | by operation | JAX alone "
        "| JAX, expert | ratio | by operation | time | temporaries, MB | ratio | flops |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = list(key(row))
        if "error" in row:
            cells += [f"error: {row['error'].splitlines()[0]}".replace("|", "/"), *[""] * 9]
        else:
            cells += [f"{row[side]['bytes'] / 1e6:.2f}" for side in SIDES]
            for side in OURS:
                worse = ratio(row, "bytes", side) > LIMIT
                cells.append(f"{'**' * worse}{ratio(row, 'bytes', side):.2f}{'**' * worse}")
            cells.append(f"{ratio(row, 'us'):.2f}")
            cells.append(", ".join(f"{row[side]['temporaries'] / 1e6:.1f}" for side in SIDES))
            cells += [f"{ratio(row, 'temporaries'):.2f}", f"{ratio(row, 'flops'):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """The worst rows, medians, and how many rows are worse than the better twin."""
    good = [row for row in rows if "error" not in row]
    lines = [f"\n{len(rows)} rows, {len(rows) - len(good)} errors"]
    if not good:
        return lines[0]
    for side, figure in itertools.product(OURS, (*FIGURES, "flops")):
        ratios = [ratio(row, figure, side) for row in good]
        above = sum(one > LIMIT for one in ratios)
        lines.append(
            f"{side}, {figure}: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}, "
            f"{above} above {LIMIT}"
        )
    lines.append("the worst by bytes:")
    worst = sorted(good, key=lambda row: ratio(row, "bytes"), reverse=True)
    lines += [f"  {ratio(row, 'bytes'):.2f} {' '.join(key(row))}" for row in worst[:WORST]]
    return "\n".join(lines)


def work(mesh: str, target: str) -> None:
    """Measure the rows that standard input names, a model and a layout each, and print each as a
    line of JSON: the part that runs in a process of its own."""
    if target == "cpu":
        jax.config.update("jax_num_cpu_devices", math.prod(map(int, mesh.split("x"))))
    for text in sys.stdin:
        model, layout = text.split()
        row: Row = {"target": target, "mesh": mesh, "model": model, "layout": layout}
        try:
            row |= measure(model, layout, mesh, None if target == "cpu" else target)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(row), flush=True)


def rows_of(
    wanted: Sequence[tuple[str, str]], mesh: str, target: str, limit: float
) -> Iterator[Row]:
    """The rows of a mesh, from a process that has so many devices. Where it ends before its time,
    the row that it was at is an error, and another process does the rest.

    Args:
        wanted: the models and layouts.
        mesh: one of `sweep.layouts.MESHES`.
        target: "cpu" or a topology.
        limit: seconds that a row may take.
    """
    left = list(wanted)
    while left:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", mesh, target]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as worker:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write("".join(f"{model} {layout}\n" for model, layout in left))
            worker.stdin.close()
            while True:
                # A compiler that finds no end also takes all the memory that there is.
                alarm = threading.Timer(limit, worker.kill)
                alarm.start()
                text = worker.stdout.readline()
                alarm.cancel()
                if not text:
                    break
                if text.startswith("{"):
                    del left[0]
                    yield json.loads(text)
        if left:
            model, layout = left.pop(0)
            row = {"target": target, "mesh": mesh, "model": model, "layout": layout}
            took = f", at {limit:.0f} s" if worker.returncode == -signal.SIGKILL else ""
            yield {**row, "error": f"the process ended with {worker.returncode}{took}"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--layouts", choices=LAYOUTS, nargs="+", default=list(LAYOUTS))
    parser.add_argument("--meshes", choices=MESHES, nargs="+", default=list(MESHES))
    parser.add_argument("--compile-for", metavar="TOPOLOGY", default="cpu", help="v5e:4x4")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the rows, a line each")
    parser.add_argument("--resume", action="store_true", help="not those that --json has already")
    parser.add_argument("--table", type=Path, metavar="FILE", help="the rows in markdown")
    parser.add_argument("--limit", type=float, default=400, help="seconds that a row may take")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    if options.resume and not options.json:
        parser.error("--resume goes on with the rows of --json FILE")
    target = options.compile_for
    meshes = options.meshes
    if target != "cpu":
        devices = math.prod(map(int, target.partition(":")[2].split("x")))
        meshes = [m for m in meshes if math.prod(map(int, m.split("x"))) == devices]
        if not meshes:
            parser.error(f"--compile-for {target}: no mesh of {devices} devices")
    done: dict[tuple[str, ...], Row] = {}
    if options.json and options.resume and options.json.exists():
        kept = [json.loads(text) for text in options.json.read_text().splitlines()]
        done = {key(row): row for row in kept if "error" not in row}
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in done.values()))
    rows: list[Row] = []
    for mesh in meshes:
        wanted = selected(options.models, options.layouts, mesh)
        at = {pair: (target, mesh, *pair) for pair in wanted}
        rows += [done[at[pair]] for pair in wanted if at[pair] in done]
        left = [pair for pair in wanted if at[pair] not in done]
        for row in rows_of(left, mesh, target, options.limit):
            print(line(row), flush=True)
            rows.append(row)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(summary(rows))
    if options.table:
        options.table.write_text(table(rows) + "\n")
    if any("error" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
