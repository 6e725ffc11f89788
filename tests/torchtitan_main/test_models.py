"""Models of torchtitan's main line on xla meshes against one process on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan isn't installed: make test-torchtitan-main")
pytest.importorskip("grain", reason="not torchtitan's main line: make test-torchtitan-main")

from tests.torchtitan_main import harness, parity, plans

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torchtitan and what it imports

# Those that together reach everything; all of them are slow, or rows of the table.
FAST = {
    ("llama3", "dp2 x tp2, chunked loss", "eager"),
    ("llama3", "dp2 x tp2", "compiled"),
    ("llama3", "dp2 x cp2", "eager"),
    ("deepseek_v3", "dp4, ep2", "compiled"),
    ("gpt_oss", "dp2 x tp2, ep4", "eager"),
}
CASES = [
    (model, plan, how)
    for model, (_, _, of_model, _) in parity.MODELS.items()
    for plan in of_model
    for how in ("eager", "compiled")
]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Model and weights, of those that have been asked for."""
    return {}


@pytest.mark.parametrize(
    ("model", "plan", "how"),
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_it_learns_as_in_one_process(model: str, plan: str, how: str, models: Any) -> None:
    """Four steps with torchtitan's optimizers, schedules and clipping; dense models' gradients'
    norms by CPU torch in double precision."""
    name, about, of_model, limit = parity.MODELS[model]
    if model not in models:
        spec = harness.debug_model(name, 2, **about)
        models[model] = spec, harness.initial_state(spec)
    spec, state = models[model]
    made = harness.Plan(**of_model[plan])
    expected = harness.on_cpu(spec, made, state, 4)
    run = harness.on_mesh(spec, made, state, 4, compiled=how == "compiled")
    assert max(map(abs, map(float.__sub__, run.losses, expected.losses))) < limit
    assert run.losses[-1] < run.losses[0] - 0.05
    if of_model is not plans.EXPERTS:
        exact = harness.on_cpu(spec, made, state, 1, torch.float64)
        assert run.norms[0] == pytest.approx(exact.norms[0], rel=2e-6)
    if how == "compiled":
        assert run.step.recompilations == []
        assert run.step.traces <= 2
