"""Reductions of consecutive segments, and their gradients, against CPU torch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh

# shape, axis, lengths: an empty segment, all of one dim, segments of their own for each row
CASES = {
    "rows": ((7, 3), 0, [2, 0, 4, 1]),
    "one dim": ((11,), 0, [5, 6]),
    "batched": ((2, 5, 3), 1, [[2, 3], [0, 5]]),
}
NAMES = ["sum", "mean", "max", "amax", "min", "amin", "prod"]


def case(name: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    shape, axis, lengths = CASES[name]
    torch.manual_seed(len(shape))
    x = torch.randn(shape)
    x.view(-1)[3] = 0  # whose product has no quotient
    x.view(-1)[4] = 0
    return x, torch.tensor(lengths), axis


def reduced(x: torch.Tensor, how: dict[str, Any]) -> list[torch.Tensor]:
    """The result and the gradient of a weighted sum of it."""
    x = x.requires_grad_()
    out = torch.segment_reduce(x, **how)
    seen = out.nan_to_num(0, 0, 0)
    # Positive weights: CPU torch shares the gradients of equal extremes, but negative ones not.
    weights = torch.arange(1.0, 1 + seen[..., :1].numel()).reshape(seen[..., :1].shape)
    (gradient,) = torch.autograd.grad((seen * weights.to(x.device)).sum(), x)
    return [out.detach(), gradient]


def on_cpu(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).cpu()


@pytest.mark.one_in(8)
@pytest.mark.parametrize("initial", [None, 0.5])
@pytest.mark.parametrize("reduce", NAMES)
@pytest.mark.parametrize("name", CASES)
def test_equals_cpu_torch(name: str, reduce: str, initial: float | None) -> None:
    x, lengths, axis = case(name)
    how: dict[str, Any] = {"reduce": reduce, "axis": axis, "initial": initial}
    expected = reduced(x.clone(), {**how, "lengths": lengths})
    found = reduced(x.to("xla"), {**how, "lengths": lengths.to("xla")})
    torch.testing.assert_close([on_cpu(t) for t in found], expected, equal_nan=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("placements", [[Shard(0), Replicate()], [Replicate(), Shard(0)]], ids=str)
@pytest.mark.parametrize("reduce", ["mean", "amax", "prod"])
@pytest.mark.parametrize("name", CASES)
def test_of_shards(name: str, reduce: str, placements: list[Placement]) -> None:
    """Also where segments, or the rows that have their own, lie across shards."""
    mesh = make_mesh("2x4")
    x, lengths, axis = case(name)
    ends = torch.cat([torch.zeros_like(lengths[..., :1]), lengths.cumsum(-1)], -1)
    expected = reduced(x.clone(), {"reduce": reduce, "axis": axis, "offsets": ends})
    ends = distribute_tensor(ends, mesh, [Replicate()] * 2)
    how = {"reduce": reduce, "axis": axis, "offsets": ends}
    found = reduced(distribute_tensor(x, mesh, placements), how)
    torch.testing.assert_close([on_cpu(t) for t in found], expected, equal_nan=True)


def test_what_is_before_the_first_offset_is_in_no_segment() -> None:
    x = torch.arange(6.0)
    offsets = torch.tensor([2, 3, 6])
    expected = torch.segment_reduce(x, "sum", offsets=offsets)
    found = torch.segment_reduce(x.to("xla"), "sum", offsets=offsets.to("xla"))
    torch.testing.assert_close(found.cpu(), expected)


def test_many_segments_take_no_more_than_their_elements() -> None:
    """Each with each would be ten thousand million comparisons, a minute and more."""
    lengths = torch.ones(100_000, dtype=torch.int64)
    x = torch.arange(100_000.0)
    found = torch.segment_reduce(x.to("xla"), "sum", lengths=lengths.to("xla"))
    assert torch.equal(found.cpu(), x)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("wrong", [[[2, 3], [6, 0]], [[2, 5], [6, 0]], [[-1, 7], [6, 0]]])
def test_lengths_that_do_not_fit_are_refused(wrong: list[list[int]], compiled: bool) -> None:
    """As by CPU torch, which looks at their values; ``unsafe`` says not to."""
    x, lengths = torch.arange(12.0).reshape(2, 6), torch.tensor(wrong)

    def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.segment_reduce(x, "sum", lengths=lengths, axis=1)

    with pytest.raises(RuntimeError) as expected:
        step(x, lengths)
    run = xd.compile(step, checks=True) if compiled else step
    with pytest.raises(RuntimeError, match=re.escape(str(expected.value).split("\n")[0])):
        run(x.to("xla"), lengths.to("xla")).cpu()
    fitting = torch.tensor([[2, 4], [6, 0]])
    found = run(x.to("xla"), fitting.to("xla"))
    torch.testing.assert_close(found.cpu(), step(x, fitting))
