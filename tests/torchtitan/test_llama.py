"""torchtitan's Llama 3 on xla meshes against one process on the CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan isn't installed: make test-torchtitan")

from tests.torchtitan import harness, plans

# Those that together reach everything; all of them are slow, or rows of the table.
FAST = ("dp2 x tp2, chunked loss", "2x2x2, full_dtensor", "dp2 x cp2, flex")


@pytest.fixture(scope="module")
def spec():
    """The debug model with two of its six layers."""
    return harness.debug_model("llama3", layers=2)


@pytest.fixture(scope="module")
def state(spec):
    """Its initial weights."""
    return harness.initial_state(spec)


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize(
    "name",
    [p if p in FAST else pytest.param(p, marks=pytest.mark.slow) for p in plans.DENSE],
)
def test_it_learns_as_in_one_process(name: str, how: str, spec, state) -> None:
    """Four steps with torchtitan's optimizers, schedules and clipping; the gradients' norms by CPU
    torch in double precision."""
    plan = harness.Plan(**plans.DENSE[name])
    expected = harness.on_cpu(spec, plan, state, 4)
    exact = harness.on_cpu(spec, plan, state, 1, torch.float64)
    run = harness.on_mesh(spec, plan, state, 4, compiled=how == "compiled")
    assert max(map(abs, map(float.__sub__, run.losses, expected.losses))) < 1e-5
    assert run.losses[-1] < run.losses[0] - 0.05
    assert run.norms[0] == pytest.approx(exact.norms[0], rel=2e-6)
    if how == "compiled":
        assert run.step.recompilations == []
