"""The rows of docs/torchtitan.md for torchtitan's main line, each against one process on the CPU.

make torchtitan-parity TORCHTITAN_SOURCE=/path/to/torchtitan
"""

from __future__ import annotations

import sys
from typing import Any

import xla_dtensor as xd
from tests.torchtitan import table
from tests.torchtitan_main import harness, plans

# By name: the registry's module, what its `model_registry` is told, plans, and how far a loss may
# be: 1e-5 for dense models, 5e-3 for experts, which torchtitan computes in bfloat16.
MODELS: dict[str, tuple[str, dict[str, Any], Any, float]] = {
    "llama3": ("llama3", {}, plans.DENSE, 1e-5),
    "qwen3": ("qwen3", {}, plans.SOME, 1e-5),
    "qwen3 MoE": ("qwen3", {"flavor": "debugmodel_moe"}, plans.EXPERTS, 5e-3),
    "deepseek_v3": ("deepseek_v3", {}, plans.EXPERTS, 5e-3),
    "gpt_oss": ("gpt_oss", {"attn_backend": "flex"}, plans.EXPERTS, 5e-3),
}
LAYERS = 2
"""Of the debug models."""


def main() -> int:
    """Print the rows.

    Returns:
        the number of runs that are off.
    """
    options = table.parser(__doc__).parse_args()
    if not options.table:
        xd.init_device_mesh("xla", (8,))  # so many simulated devices
    rows = [
        table.Row(f"{title}, main", plan, about, limit)
        for title, (_, _, of_model, limit) in MODELS.items()
        for plan, about in of_model.items()
    ]
    return table.make(rows, _measure, options)


_models: dict[str, tuple[Any, Any]] = {}
_expected: dict[Any, harness.Run] = {}


def _measure(row: table.Row, steps: int, compiled: bool) -> tuple[float, int]:
    if row.model not in _models:
        name, about, *_ = MODELS[row.model.removesuffix(", main")]
        spec = harness.debug_model(name, LAYERS, **about)
        _models[row.model] = spec, harness.initial_state(spec)
    spec, state = _models[row.model]
    plan = harness.Plan(**row.about)
    key = row.model, plan.on_one_device, steps
    if key not in _expected:  # many plans have the same
        _expected[key] = harness.on_cpu(spec, plan, state, steps)
    run = harness.on_mesh(spec, plan, state, steps, compiled=compiled)
    off = max(map(abs, map(float.__sub__, run.losses, _expected[key].losses)))
    return off, len(run.step.recompilations) if compiled else 0


if __name__ == "__main__":
    sys.exit(main())
