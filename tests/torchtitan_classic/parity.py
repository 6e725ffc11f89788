"""The rows of docs/torchtitan.md for torchtitan 0.2.2: each plan against one process on the CPU."""

from __future__ import annotations

import argparse
import sys
import time

import xla_dtensor as xd
from tests.torchtitan_classic import harness

TITLE, LIMIT = "llama3, 0.2.2", 1e-5


def main() -> int:
    """Print the rows.

    Returns:
        the number of those that are off.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compiled", action="store_true", help="leave the eager runs out")
    parser.add_argument("--only", help="rows that contain this text")
    options = parser.parse_args()
    xd.init_device_mesh("xla", (8,))  # so many simulated devices
    state = harness.initial_state()
    expected = harness.on_cpu(state, options.steps)
    wrong = 0
    for name, about in harness.PLANS.items():
        if options.only and options.only not in f"{TITLE}, {name}":
            continue
        start, found, again = time.monotonic(), [], 0
        for compiled in (True,) if options.compiled else (True, False):
            run = harness.on_mesh(harness.Plan(**about), state, options.steps, compiled=compiled)
            off = max(map(abs, map(float.__sub__, run.losses, expected.losses)))
            found.append(f"{off:.1e}")
            wrong += not off < LIMIT
            again = len(run.step.recompilations) if compiled else again
        eager = found[1] if len(found) > 1 else "-"
        cells = [TITLE, name, str(options.steps), found[0], eager, str(again)]
        print("|", " | ".join(cells), "|", flush=True)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
