"""torchtitan 0.2.2's plan (``apply_tp``, ``apply_fsdp``) against one process on the CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "torchtitan.models.llama3.infra",
    reason="torchtitan 0.2.2 isn't installed: make test-torchtitan",
)

from tests.torchtitan_classic import harness

FAST = ("2x2x2",)


@pytest.fixture(scope="module")
def state():
    """Its initial weights."""
    return harness.initial_state()


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize(
    "name",
    [p if p in FAST else pytest.param(p, marks=pytest.mark.slow) for p in harness.PLANS],
)
def test_it_learns_as_in_one_process(name: str, how: str, state) -> None:
    """Four steps with torchtitan's optimizers, schedules and clipping; the gradients' norms by CPU
    torch in double precision."""
    plan = harness.Plan(**harness.PLANS[name])
    expected = harness.on_cpu(state, 4, averaged_over=plan.averaged_over)
    exact = harness.on_cpu(state, 1, torch.float64, plan.averaged_over)
    run = harness.on_mesh(plan, state, 4, compiled=how == "compiled")
    assert max(map(abs, map(float.__sub__, run.losses, expected.losses))) < 1e-5
    assert run.losses[-1] < run.losses[0] - 0.05
    assert run.norms[0] == pytest.approx(exact.norms[0], rel=2e-6)
    if how == "compiled":
        assert run.step.recompilations == []
