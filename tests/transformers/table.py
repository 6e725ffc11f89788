"""The table of docs/transformers.md: each architecture against CPU torch.

make transformers-table
make transformers-table ARGS="--only Llama"
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

import transformers

import xla_dtensor as xd
from tests.transformers import harness
from tests.transformers.architectures import ALL

LIMIT = 1e-4  # of gradients, relative


def main() -> int:
    """Print the table.

    Returns:
        the number of rows that are off.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="architectures, with commas between their names")
    parser.add_argument("--plan", choices=["by size", "its own"], help="one plan alone")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    grid = xd.init_device_mesh("xla", (2, 2), mesh_dim_names=("dp", "tp"))
    line = xd.init_device_mesh("xla", (2,), mesh_dim_names=("tp",))
    print("| architecture | plan | parameters cut | loss | gradients |")
    print("|---|---|---|---|---|")
    wrong = 0
    for architecture in ALL:
        if options.only and architecture.name not in options.only.split(","):
            continue
        wanted = harness.on_cpu(architecture)
        plans = {"by size": (harness.by_size, grid)}
        if harness.has_plan(architecture):
            plans["its own"] = (harness.by_plan, line)
        for plan, (lay_out, mesh) in plans.items():
            if options.plan and plan != options.plan:
                continue
            start = time.monotonic()
            try:
                model, batch = lay_out(architecture, mesh)
                found = harness.difference(harness.run(model, batch), wanted, model)
            except xd.XlaDTensorError as error:
                traceback.print_exc()
                cells = [architecture.name, plan, "-", "-", f"refused: {type(error).__name__}"]
                wrong += 1
            else:
                cut, count = found.sharded
                cells = [architecture.name, plan, f"{cut} of {count}"]
                cells += [f"{found.loss:.1e}", f"{found.gradient:.1e}"]
                wrong += not found.gradient < LIMIT
                print(f"{architecture.name}: worst at {found.where}", file=sys.stderr)
            print("|", " | ".join(cells), "|", flush=True)
            print(f"{architecture.name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
