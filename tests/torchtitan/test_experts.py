"""torchtitan's experts where all tokens want the same: a room for each, or a capacity."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan isn't installed: make test-torchtitan")

import xla_dtensor as xd
from tests.torchtitan import harness, parity
from tests.torchtitan.plan import BATCH, Plan
from tests.torchtitan.releases.v0_3_0 import SHORT
from xla_dtensor import torchtitan

pytestmark = pytest.mark.filterwarnings("ignore")  # of float32 autocast on the CPU, among others


@pytest.fixture
def _capacity() -> Iterator[None]:
    yield
    torchtitan.set_expert_capacity(None)


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.usefixtures("_capacity")
def test_some_experts_get_every_token(capacity: float | None) -> None:
    """All tokens want the first experts, so one device gets what all devices have to send: there
    is room, or, with a capacity, what is dropped is counted."""
    spec, state = parity.model_of("deepseek_v3")
    state = dict(state)
    (bias,) = (name for name in state if name.endswith("expert_bias_E"))
    experts = len(state[bias])
    state[bias] = state[bias] + 100.0 * (experts - torch.arange(experts))
    plan = Plan(dp_shard=4, ep=4, **SHORT)
    torchtitan.set_expert_capacity(capacity)
    run = harness.on_mesh(spec, plan, state, 1, compiled=True)
    expected = harness.on_cpu(spec, plan, state, 1)
    layer = spec.model.layers[-1]
    top = layer.moe.router.top_k
    tokens = BATCH * plan.sequence // 4  # of one device
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
