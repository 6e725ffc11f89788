"""What XLA is told of the layouts that were chosen."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.layouts import constrain
from xla_dtensor.planning.collectives import collective_traffic

R, S = xd.Replicate(), xd.Shard


def steps(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = (x * 2 + 1).tanh() - x
    return (x @ w).relu() * 0.5


def residual(x: Tensor, w: Tensor) -> Tensor:
    """What follows from its neighbours is also read where another layout is wanted."""
    y = (x + 1).exp()
    return y * 2 + (y.T.reshape(32, 64) @ w).sum() + y.mean()


@pytest.mark.parametrize("function", [steps, residual])
@pytest.mark.parametrize("of_weight", [[R, S(1)], [S(0), S(1)], [S(1), S(0)]])
def test_what_follows_is_not_asked_for_and_moves_no_more(
    function: Callable[..., Any], of_weight: list[Any]
) -> None:
    mesh = make_mesh("2x4")
    torch.manual_seed(0)
    x, w = torch.randn(64, 32), torch.randn(32 if function is steps else 64, 64) / 8
    given = xd.distribute_tensor(x, mesh, [S(0), R]), xd.distribute_tensor(w, mesh, of_weight)
    found = {}
    for axes in (2, 0):
        with patch.object(constrain, "LOOSE_AXES", axes):
            step = xd.compile(function)
            out = step(*given).full_tensor().cpu()
            torch.testing.assert_close(out, function(x, w))
            text = step.lower(*given).as_text()
        moved = collective_traffic(step.compiled_programs()[-1].as_text()).total_bytes
        found[axes] = text.count("sdy.sharding_constraint"), moved
    (few, moved), (many, of_all) = found[2], found[0]
    assert few < many and moved == of_all


def test_on_its_way_to_another_axis_a_value_is_cut_first() -> None:
    """A gradient is made in parts along an idle axis and kept by parts along another: XLA would
    take it whole between."""
    mesh = make_mesh("2x4")
    torch.manual_seed(0)
    x, y = torch.randn(64, 32), torch.randn(64, 48)
    function = lambda x, y: (x.T @ y).redistribute(mesh, [S(0), R])
    given = [xd.distribute_tensor(t, mesh, [S(0), R]) for t in (x, y)]
    step = xd.compile(function)
    torch.testing.assert_close(step(*given).full_tensor().cpu(), x.T @ y)
    moved = collective_traffic(step.compiled_programs()[-1].as_text()).total_bytes
    assert moved <= 32 * 48 * 4 * (1 / 4 + 1 / 2)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_what_goes_to_another_dim_goes_before_it_is_gathered(shape: tuple[int, int]) -> None:
    """Of a dim that both axes cut one goes to another dim, and the other ceases to cut: told of the
    end alone, XLA makes all of it whole on all devices."""
    mesh = make_mesh("x".join(map(str, shape)))
    values = torch.randn(64, 64)
    both, one = [xd.Shard(1), xd.Shard(1)], [xd.Shard(0), xd.Replicate()]
    step = xd.compile(lambda x: (x.sin() * 2).redistribute(placements=one).cos())
    x = xd.distribute_tensor(values, mesh, both)
    torch.testing.assert_close(step(x).full_tensor().cpu(), (values.sin() * 2).cos())
    moved = collective_traffic(step.compiled_programs()[-1].as_text()).total_bytes
    assert moved <= 0.75 * 64 * 64 * 4  # a device's part of the result, and its way there


@pytest.mark.parametrize("mesh", ["2x4", "4x2", "2x2x2"])
def test_all_ways_of_a_value(mesh: str) -> None:
    """From each layout of three dims to each other one, in pairs of a step."""
    on = make_mesh(mesh)
    values = torch.randn(8, 8, 16)
    kinds = [xd.Shard(0), xd.Shard(1), xd.Shard(2), xd.Replicate()]
    ways = [*itertools.product(kinds, repeat=on.ndim)]
    draw = random.Random(mesh)
    pairs = [(draw.choice(ways), draw.choice(ways)) for _ in range(24)]
    given = [xd.distribute_tensor(values + i, on, list(a)) for i, (a, _) in enumerate(pairs)]

    @xd.compile
    def step(*given: Any) -> list[Any]:
        return [
            x.sin().redistribute(placements=list(b)) * 2
            for x, (_, b) in zip(given, pairs, strict=True)
        ]

    for i, found in enumerate(step(*given)):
        torch.testing.assert_close(found.full_tensor().cpu(), (values + i).sin() * 2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, w, again: again((x @ w).sin().sum()).clone().sum() + (x @ w).sum(),
        lambda x, w, again: again((x @ w).amax()).clone() + again(w.norm()),
        lambda x, w, again: checkpoint(
            lambda y: again((y @ w).sin().sum()), x, use_reentrant=False
        ).sum(),
    ],
    ids=["two", "of a weight", "recomputed"],
)
def test_a_loss_that_is_laid_out_again(loss: Callable[..., Tensor]) -> None:
    """Its own gradient is a number in the program, and no value of it."""
    mesh = make_mesh("2x4")
    torch.manual_seed(0)
    x, w = torch.randn(8, 16), torch.randn(16, 8, requires_grad=True)
    wanted = loss(x, w, lambda t: t)
    of_w = torch.autograd.grad(wanted, w)
    own = xd.distribute_tensor(w.detach(), mesh, [R, S(0)]).requires_grad_()

    def step(x: Tensor) -> tuple[Tensor, ...]:
        found = loss(x, own, lambda t: t.redistribute(placements=[R, R]))
        return found, *torch.autograd.grad(found, own)

    got = xd.compile(step)(xd.distribute_tensor(x, mesh, [S(0), R]))
    for one, other in zip(got, (wanted, *of_w), strict=True):
        torch.testing.assert_close(one.full_tensor().detach().cpu(), other.detach())
