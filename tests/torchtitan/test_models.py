"""torchtitan's models on xla meshes against one process on the CPU, whichever release is there."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan isn't installed: make test-torchtitan")

from tests.torchtitan import harness, parity
from tests.torchtitan.plan import Plan
from tests.torchtitan.releases import release

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torchtitan and what it imports

CASES = [
    (model, plan, how)
    for model, (_, _, plans, _) in release.models.items()
    for plan, about in plans.items()
    for how in ("eager", "compiled")
    if how == "eager" or not about.get("checked")  # each call of such a step would be traced
]


@pytest.mark.parametrize(
    ("model", "plan", "how"),
    [
        case if case in release.fast else pytest.param(*case, marks=pytest.mark.slow)
        for case in CASES
    ],
)
def test_it_learns_as_in_one_process(model: str, plan: str, how: str) -> None:
    """Four steps with torchtitan's optimizers, schedules and clipping; dense models' gradients'
    norms by CPU torch in double precision."""
    *_, plans, limit = release.models[model]
    made = Plan(**plans[plan])
    expected = parity.expected(model, made, 4)
    run = parity.on_mesh(model, made, 4, how == "compiled")
    assert run.off(expected) < limit
    assert run.losses[-1] < run.losses[0] - 0.05
    if limit < 1e-4:
        spec, state = parity.model_of(model)
        exact = harness.on_cpu(spec, made, state, 1, torch.float64)
        assert run.norms[0] == pytest.approx(exact.norms[0], rel=2e-6)
    else:  # experts, in bfloat16
        assert run.norms[0] == pytest.approx(expected.norms[0], rel=1e-3)
    assert run.recompilations == []
