"""torchtitan's mixture-of-experts models against one process on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan isn't installed: make test-torchtitan")

import xla_dtensor as xd
from tests.torchtitan import harness, plans
from xla_dtensor import torchtitan

pytestmark = pytest.mark.filterwarnings("ignore")  # of float32 autocast on the CPU, among others

MODELS = {"qwen3": ("debugmodel_moe", 1), "deepseek_v3": ("debugmodel", 2)}
FAST = ("deepseek_v3", "dp2 x tp2, ep4", "compiled")


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Model, weights and the run on the CPU, of those that have been asked for."""
    return {}


def _model(name: str, models: dict[str, Any]) -> Any:
    if name not in models:
        flavor, layers = MODELS[name]
        spec = harness.debug_model(name, layers, flavor)
        state = harness.initial_state(spec)
        run = harness.on_cpu(spec, harness.Plan(**plans.SHORT), state, 4)
        models[name] = spec, state, run
    return models[name]


@pytest.mark.parametrize(
    ("name", "plan", "how"),
    [
        case if case == FAST else pytest.param(*case, marks=pytest.mark.slow)
        for name in MODELS
        for plan in plans.EXPERTS
        for how in ("eager", "compiled")
        for case in [(name, plan, how)]
    ],
)
def test_it_learns_as_in_one_process(name: str, plan: str, how: str, models: Any) -> None:
    """Four steps, with torchtitan's balancing of the experts' load between them."""
    spec, state, expected = _model(name, models)
    about = harness.Plan(**plans.EXPERTS[plan])
    run = harness.on_mesh(spec, about, state, 4, compiled=how == "compiled")
    assert max(map(abs, map(float.__sub__, run.losses, expected.losses))) < 5e-3
    assert run.losses[-1] < run.losses[0] - 0.05
    assert run.norms[0] == pytest.approx(expected.norms[0], rel=1e-3)
    if how == "compiled":  # the counts of tokens differ from device to device from the second on
        assert len(run.step.recompilations) <= 1


@pytest.fixture
def _capacity() -> Iterator[None]:
    yield
    torchtitan.set_expert_capacity(None)


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.usefixtures("_capacity")
def test_some_experts_get_every_token(capacity: float | None, models: Any) -> None:
    """All tokens want the first experts, so one device gets what all devices have to send: there
    is room, or, with a capacity, what is dropped is counted."""
    spec, state, _ = _model("deepseek_v3", models)
    state = dict(state)
    (bias,) = (name for name in state if name.endswith("expert_bias_E"))
    experts = len(state[bias])
    state[bias] = state[bias] + 100.0 * (experts - torch.arange(experts))
    plan = harness.Plan(dp_shard=4, ep=4, **plans.SHORT)
    torchtitan.set_expert_capacity(capacity)
    run = harness.on_mesh(spec, plan, state, 1, compiled=True)
    expected = harness.on_cpu(spec, plan, state, 1)
    layer = spec.model.layers[-1]
    top = layer.moe.router.top_k
    tokens = harness.BATCH * plan.sequence // 4  # of one device
    (dropped,) = torchtitan.dropped_rows(run.model).values()
    difference = abs(run.losses[0] - expected.losses[0])
    if capacity is None:
        assert dropped == 0
        assert difference < 5e-3
        return
    slots = tokens * top // 4
    own = experts // 4  # experts of a device
    wanted = [tokens * len(range(first, min(first + own, top))) for first in range(0, top, own)]
    assert dropped == 4 * sum(max(0, rows - slots) for rows in wanted) > 0
    assert difference < 0.5  # the rest of the model, and experts for what had room


def test_a_capacity_is_positive() -> None:
    with xd.config.override(expert_capacity=1.5):
        with pytest.raises(ValueError, match="above 0"):
            torchtitan.set_expert_capacity(0)
        assert xd.config.expert_capacity == 1.5
        torchtitan.set_expert_capacity(None)
        assert xd.config.expert_capacity is None
