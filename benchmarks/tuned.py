"""`xd.tune` against all layouts of `layout_sweep.py`: what a step moves, and how long it takes.

    python benchmarks/tuned.py                          # --models gpt moe, --top 3, --run
    python benchmarks/tuned.py --timed                  # --rounds 10

For each model of the sweep `xd.tune` looks for a mesh of eight simulated devices and for layouts.
The bytes of collectives in XLA's program for what it has found stand next to the least of the rows
that the sweep has for eight devices, on meshes 8, 2x4, 4x2 and 2x2x2 (read from the table in
`benchmarks/README.md`). The losses must agree with CPU torch's. With ``--run`` the best are run and
ranked by that.

With ``--timed`` those rows are compiled, and on each mesh of several axes hybrid sharding
(parameters over all but the last axis, the batch over all), and `xd.tune(topology="here")` runs its
ten best and takes the fastest; then all of them are timed in turns, in one process, a step of each
after the other. What counts is how much slower the found one is than the fastest of the list. A
language model of LSTM layers is among these models, which the sweep doesn't have.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("NPROC", "64")

from sweep import lstm
from sweep.layouts import OnMesh, on_mesh
from sweep.models import MODELS
from sweep.sides import case

import xla_dtensor as xd
from xla_dtensor.planning.collectives import collective_traffic

TABLE = Path(__file__).with_name("README.md")
MESHES = ("8", "2x4", "4x2", "2x2x2")
STEPS = 2
TIMED = {name: MODELS[name] for name in ("llama", "fused", "moe", "resnet", "vit")}
TIMED["lstm"] = lstm.MODEL


def of_the_sweep(model: str) -> dict[str, float]:
    """The megabytes of each row that the table has for eight devices, by mesh and layout."""
    row = re.compile(r"\| cpu \| (\S+) \| (\S+) \| (\S+) \| ([\d.]+) \|")
    found = (row.match(line) for line in TABLE.read_text().splitlines())
    return {f"{m[3]} {m[1]}": float(m[4]) for m in found if m and m[2] == model and m[1] in MESHES}


def tuned(model: str, top: int, run: bool) -> dict[str, Any]:
    made = MODELS[model]
    plain = case(made, OnMesh.of("dp", "8"))
    batches = made.make_batches(STEPS)

    def build(parallelize: Any) -> Any:
        return plain.make_step(parallelize(plain.make_model()))

    start = time.perf_counter()
    found = xd.tune(build, batches[0], topology="cpu:8", top=top, run=run)
    took = time.perf_counter() - start
    step = xd.compile(build(found.best.apply))
    reference = plain.make_step(plain.make_model())
    for batch in batches:
        loss, right = step(*found.best.place(*batch)).item(), reference(*batch).item()
        if not abs(loss - right) <= plain.tolerance * abs(right):  # also catches NaN
            raise SystemExit(f"{model}: loss {loss}, CPU torch's {right}")
    return {
        "found": found.best.describe(),
        "megabytes": megabytes(step),
        "looked at": len(found.trials),
        "seconds": took,
    }


def megabytes(step: Any) -> float:
    text = step.compiled_programs()[-1].as_text()
    return float(collective_traffic(text).total_bytes / 1e6)


def rows(model: str) -> dict[str, tuple[Any, Any]]:
    """The step and the batch of each layout on each mesh of eight devices, compiled."""
    made = TIMED[model]
    found = {}
    for mesh in MESHES:
        for layout in on_mesh((*made.layouts, "hsdp"), mesh):
            on = OnMesh.of(layout, mesh)
            own = case(made, on)
            device_mesh = xd.init_device_mesh("xla", on.shape, mesh_dim_names=on.axes)
            step = xd.compile(own.make_step(own.shard_model(own.make_model(), device_mesh)))
            batch = tuple(own.shard_batch(x, device_mesh) for x in made.make_batches(1)[0])
            found[f"{mesh} {layout}"] = step, batch
    return found


def timed(model: str, top: int, rounds: int) -> str:
    """A line of the table: the found configuration next to all rows, each step in turn."""
    made = TIMED[model]
    plain = case(made, OnMesh.of("dp", "8"))

    def build(parallelize: Any) -> Callable[..., Any]:
        return plain.make_step(parallelize(plain.make_model()))

    steps = rows(model)
    start = time.perf_counter()
    best = xd.tune(build, made.make_batches(1)[0], topology="here", top=top).best
    took = time.perf_counter() - start
    steps["found"] = xd.compile(build(best.apply)), best.place(*made.make_batches(1)[0])
    losses = {
        name: [step(*batch).item() for _ in range(STEPS)] for name, (step, batch) in steps.items()
    }
    reference = plain.make_step(plain.make_model())
    right = [reference(*made.make_batches(1)[0]).item() for _ in range(STEPS)]
    for name, each in losses.items():
        if not all(
            abs(a - b) <= plain.tolerance * abs(b) for a, b in zip(each, right, strict=True)
        ):
            raise SystemExit(f"{model}, {name}: losses {each}, CPU torch's {right}")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, (step, batch) in steps.items():
            begin = time.perf_counter()
            step(*batch).item()
            seconds[name].append(time.perf_counter() - begin)
    median = {name: statistics.median(each) for name, each in seconds.items()}
    moved = {name: megabytes(step) for name, (step, _) in steps.items()}
    own, own_moved = median.pop("found"), moved.pop("found")
    fastest, slowest = min(median, key=median.__getitem__), max(median, key=median.__getitem__)
    ratios = [t / b for t, b in zip(seconds["found"], seconds[fastest], strict=True)]
    faster = sum(each < own for each in median.values())
    return (
        f"| {model} | {best.describe()} | {own * 1e3:.0f} ms | {fastest} | "
        f"{median[fastest] * 1e3:.0f} ms | {statistics.median(ratios):.2f} | "
        f"{faster} of {len(median)} | {slowest} | {median[slowest] * 1e3:.0f} ms | "
        f"{own_moved:.2f} | {min(moved.values()):.2f} | {took:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices={**MODELS, **TIMED})
    parser.add_argument("--top", type=int, help="how many XLA compiles: 3, or 10 with --timed")
    parser.add_argument("--run", action="store_true", help="time those, too")
    parser.add_argument("--timed", action="store_true", help="time them next to all layouts")
    parser.add_argument("--rounds", type=int, default=10, help="of --timed")
    given = parser.parse_args()
    if given.timed:
        print(
            "| model | found | step | fastest of the list | step | ratio | faster than found "
            "| slowest | step | MB | least MB | seconds |"
        )
        print("|---|---|---:|---|---:|---:|---:|---|---:|---:|---:|---:|")
        for model in given.models or TIMED:
            print(timed(model, given.top or 10, given.rounds), flush=True)
        return
    print("| model | found | MB | least of the sweep | MB | ratio | of so many | seconds |")
    print("|---|---|---:|---|---:|---:|---:|---:|")
    for model in given.models or MODELS:
        listed = of_the_sweep(model)
        least = min(listed, key=listed.__getitem__)
        own = tuned(model, given.top or 3, given.run)
        cells = [model, own["found"], f"{own['megabytes']:.2f}", least, f"{listed[least]:.2f}"]
        cells += [f"{own['megabytes'] / listed[least]:.2f}", f"{len(listed)}"]
        print(f"| {' | '.join(cells)} | {own['seconds']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
