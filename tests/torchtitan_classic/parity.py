"""The rows of docs/torchtitan.md for torchtitan 0.2.2: each plan against one process on the CPU."""

from __future__ import annotations

import functools
import sys
from typing import Any

import xla_dtensor as xd
from tests.torchtitan import table
from tests.torchtitan_classic import harness


def main() -> int:
    """Print the rows.

    Returns:
        the number of runs that are off.
    """
    options = table.parser(__doc__).parse_args()
    if not options.table:
        xd.init_device_mesh("xla", (8,))  # so many simulated devices
    plans = harness.PLANS.items()
    rows = [table.Row("llama3, 0.2.2", plan, about, 1e-5) for plan, about in plans]
    return table.make(rows, _measure, options)


@functools.cache
def _expected(steps: int, averaged_over: int) -> tuple[Any, harness.Run]:
    state = harness.initial_state()
    return state, harness.on_cpu(state, steps, averaged_over=averaged_over)


def _measure(row: table.Row, steps: int, compiled: bool) -> tuple[float, int]:
    plan = harness.Plan(**row.about)
    state, expected = _expected(steps, plan.averaged_over)
    run = harness.on_mesh(plan, state, steps, compiled=compiled)
    off = max(map(abs, map(float.__sub__, run.losses, expected.losses)))
    return off, len(run.step.recompilations) if compiled else 0


if __name__ == "__main__":
    sys.exit(main())
