"""A move of a mesh axis from one dim to another says where the value was computed."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from benchmarks.hlo import collective_traffic

TOKENS, EXPERTS, WIDTH = 16, 8, 32


@pytest.fixture
def experts(mesh_2x4):
    weight = distribute_tensor(
        torch.randn(EXPERTS, WIDTH, WIDTH), mesh_2x4, [Replicate(), Shard(0)]
    )
    return weight.requires_grad_()


def test_experts_stay_where_they_are(mesh_2x4, experts):
    """Tokens go to the experts and back; no expert goes to the tokens, in forward nor backward."""
    tokens = torch.randn(EXPERTS, TOKENS, WIDTH)
    by_token = distribute_tensor(tokens, mesh_2x4, [Shard(1), Shard(1)])

    def step(x: torch.Tensor) -> torch.Tensor:
        at_experts = x.redistribute(placements=[Shard(1), Shard(0)])
        given = torch.einsum("etd,edf->etf", at_experts, experts).tanh()
        loss = given.redistribute(placements=[Shard(1), Shard(1)]).square().sum()
        loss.backward()
        return loss

    compiled = xd.compile(step)
    loss = compiled(by_token)
    traffic = collective_traffic(compiled.compiled_programs()[-1].as_text())
    assert set(traffic.counts) == {"all-to-all", "all-reduce"}

    weight = experts.detach().full_tensor().cpu().requires_grad_()
    expected = torch.einsum("etd,edf->etf", tokens, weight).tanh().square().sum()
    expected.backward()
    torch.testing.assert_close(loss.full_tensor().cpu(), expected)
    torch.testing.assert_close(experts.grad.full_tensor().cpu(), weight.grad)


WHOLE = [Replicate(), Replicate()]


@pytest.mark.parametrize(
    ("x", "weight", "computed", "target"),
    [
        ([Shard(0), Shard(1)], WHOLE, None, [Shard(1), Shard(0)]),
        ([Shard(0), Shard(0)], WHOLE, [Shard(0), Shard(0)], [Replicate(), Shard(1)]),
        ([Shard(0), Shard(0)], WHOLE, [Shard(0), Shard(0)], [Shard(1), Shard(1)]),
        (WHOLE, [Shard(1), Shard(1)], [Shard(1), Shard(1)], [Shard(0), Shard(1)]),
        ([Shard(1), Replicate()], [Shard(0), Shard(1)], [Partial(), Shard(1)], [Shard(0)] * 2),
        ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Partial()], [Shard(1)] * 2),
    ],
    ids=str,
)
def test_values(mesh_2x4, x, weight, computed, target):
    """Also of uneven dims, and of sums that wait."""
    whole, eye = torch.randn(7, 10), torch.eye(10)
    seen = []

    @xd.compile
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        seen.append(list(y.placements))
        return y.redistribute(placements=target)

    moved = step(distribute_tensor(whole, mesh_2x4, x), distribute_tensor(eye, mesh_2x4, weight))
    assert computed is None or seen[0] == computed
    assert list(moved.placements) == target
    torch.testing.assert_close(moved.full_tensor().cpu(), whole)
