"""`xd.tune` against all layouts of `layout_sweep.py`, by what a step moves.

    python benchmarks/tuned.py                          # --models gpt moe, --top 3, --run

For each model of the sweep `xd.tune` looks for a mesh of eight simulated devices and for layouts.
The bytes of collectives in XLA's program for what it has found stand next to the least of the rows
that the sweep has for eight devices, on meshes 8, 2x4, 4x2 and 2x2x2 (read from the table in
`benchmarks/README.md`). The losses must agree with CPU torch's. With ``--run`` steps are timed,
too.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("NPROC", "64")

from sweep.layouts import OnMesh
from sweep.models import MODELS
from sweep.sides import case

import xla_dtensor as xd
from xla_dtensor.planning.collectives import collective_traffic

TABLE = Path(__file__).with_name("README.md")
MESHES = ("8", "2x4", "4x2", "2x2x2")
STEPS = 2


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
    program = step.compiled_programs()[-1]
    return {
        "found": found.best.describe(),
        "megabytes": collective_traffic(program.as_text()).total_bytes / 1e6,
        "looked at": len(found.trials),
        "seconds": took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--top", type=int, default=3, help="how many XLA compiles")
    parser.add_argument("--run", action="store_true", help="time those, too")
    given = parser.parse_args()
    print("| model | found | MB | least of the sweep | MB | ratio | of so many | seconds |")
    print("|---|---|---:|---|---:|---:|---:|---:|")
    for model in given.models:
        rows = of_the_sweep(model)
        least = min(rows, key=rows.__getitem__)
        own = tuned(model, given.top, given.run)
        print(
            f"| {model} | {own['found']} | {own['megabytes']:.2f} | {least} | {rows[least]:.2f} | "
            f"{own['megabytes'] / rows[least]:.2f} | {len(rows)} | {own['seconds']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
