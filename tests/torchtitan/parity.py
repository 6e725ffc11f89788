"""The table of docs/torchtitan.md: each plan against one process on the CPU.

make torchtitan-parity > table.md
make torchtitan-parity ARGS="--only 'dp4' --steps 4"
make torchtitan-parity TORCHTITAN_SOURCE=/path/to/torchtitan  # the main line's rows, too
"""

from __future__ import annotations

import sys
from typing import Any

import xla_dtensor as xd
from tests.torchtitan import harness, table
from tests.torchtitan.plan import Plan, Run
from tests.torchtitan.releases import release

LAYERS = 2
"""Of the debug models."""


def main() -> int:
    """Print the rows of the release that is installed.

    Returns:
        the number of runs that are off.
    """
    options = table.parser(__doc__).parse_args()
    if not options.table:
        xd.init_device_mesh("xla", (8,))  # so many simulated devices
    rows = [
        table.Row(title + release.suffix, plan, about, limit)
        for title, (_, _, of_model, limit) in release.models.items()
        for plan, about in of_model.items()
    ]
    return table.make(rows, _measure, options)


_models: dict[str, tuple[Any, Any]] = {}
_expected: dict[Any, Run] = {}


def model_of(title: str) -> tuple[Any, dict[str, Any]]:
    """A model by its name in the table, and its weights."""
    if title not in _models:
        name, about, *_ = release.models[title]
        spec = release.debug_model(name, LAYERS, **about)
        _models[title] = spec, harness.initial_state(spec)
    return _models[title]


def expected(title: str, plan: Plan, steps: int) -> Run:
    """The run on the CPU, which many plans have in common."""
    spec, state = model_of(title)
    key = title, plan.on_one_device, release.averaged_over(plan), steps
    if key not in _expected:
        _expected[key] = harness.on_cpu(spec, plan, state, steps)
    return _expected[key]


def on_mesh(title: str, plan: Plan, steps: int, compiled: bool) -> Run:
    """The run on a mesh, or on those of a pipeline's stages."""
    run = harness.on_mesh
    if plan.pp > 1:
        from tests.torchtitan import pipeline  # the main line's alone

        run = pipeline.on_mesh
    spec, state = model_of(title)
    return run(spec, plan, state, steps, compiled=compiled)


def _measure(row: table.Row, steps: int, compiled: bool) -> tuple[float, int]:
    title, plan = row.model.removesuffix(release.suffix), Plan(**row.about)
    run = on_mesh(title, plan, steps, compiled)
    return run.off(expected(title, plan, steps)), len(run.recompilations)


if __name__ == "__main__":
    sys.exit(main())
