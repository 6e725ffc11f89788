"""Operations at which two axes would change places, and the order in which axes are chosen."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh
from tests.layouts.test_prices import choice
from xla_dtensor.compilation.program import executable
from xla_dtensor.layouts import choose
from xla_dtensor.layouts.choice import Choice
from xla_dtensor.layouts.prices import BY_TIME


def block(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """As few rows as here are cheaper to move than weights."""
    return (x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)).square().sum()


def values_of_block() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(32, 64), (128, 64), (128, 64), (64, 128)]
    return [torch.randn(shape) / 8 for shape in shapes]


def chosen(x: Tensor, weights: list[Tensor], expected: Tensor) -> Choice:
    """How a step of it on devices lies, which gives the same."""
    found: list[Choice] = []

    def choose_for(*args: Any) -> Choice:
        found.append(choose.choose_for(*args))
        return found[-1]

    with patch.object(executable, "choose_for", choose_for):
        got = xd.compile(lambda x: block(x, *weights))(x).full_tensor()
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)
    return found[-1]


def test_axes_that_changed_places_are_chosen_anew() -> None:
    """ "dp", the first, cut both first products as "tp" cuts all around them; "tp" then had to cut
    them as "dp" does, and neither left that by itself."""
    mesh = make_mesh("2x4")
    values = values_of_block()
    dims = [(0, 1), (1, 0), (1, 1), (1, 0)]
    x, *weights = [
        distribute_tensor(value, mesh, [Shard(d) for d in own])
        for value, own in zip(values, dims, strict=True)
    ]
    expected = block(*values)
    with patch.object(choose._Chooser, "turn_back", lambda self: None):
        before = chosen(x, weights, expected)
    after = chosen(x, weights, expected)
    assert before.turned() and not after.turned()
    assert after.price() < 0.9 * before.price()


@pytest.mark.parametrize(
    "dims",
    [
        [(1, 1, 0), (1, None, 1), (1, 1, 1), (1, None, 0)],
        [(1, 0, 1), (0, None, None), (0, None, 0), (0, 1, None)],
    ],
)
def test_three_axes_are_chosen_in_all_orders(dims: list[tuple[int | None, ...]]) -> None:
    """In the mesh's order, and backwards, an axis takes what another needed more."""
    mesh = make_mesh("2x2x2")
    x, *weights = values = values_of_block()
    given = [
        distribute_tensor(value, mesh, [Replicate() if d is None else Shard(d) for d in own])
        for value, own in zip(values, dims, strict=True)
    ]
    expected = block(x, *weights)
    with patch.object(choose, "ORDERED", 0):
        before = chosen(given[0], given[1:], expected)
    after = chosen(given[0], given[1:], expected)
    assert after.price() < 0.95 * before.price()


def test_axes_change_places_in_state() -> None:
    """Of a weight that both axes cut each alone would have to go where the other is."""
    sizes = {"dp": 16, "tp": 4}
    given: Any = [((1024, 32), (("dp",), ())), ((4096, 512), None), ((512, 4096), None)]

    def updated(tokens: Any, *weights: Any) -> Any:
        def loss(weights: Any) -> Any:
            table, out = (each.astype(jnp.bfloat16) for each in weights)
            return jnp.square(table[tokens.astype(int)] @ out).sum()

        pairs = zip(weights, jax.grad(loss)(weights), strict=True)
        return sum((weight - gradient).sum() for weight, gradient in pairs)

    def found() -> Choice:
        return choice(updated, given, (), (0,), sought=[1, 2], prices=BY_TIME, sizes=sizes)

    changed: list[float] = []

    def change_places(chooser: choose._Chooser) -> None:
        chooser.choice = chooser.choice.copy()
        for group, states in chooser.choice.states.items():
            dp, tp = states.get(("dp",)), states.get(("tp",))
            if group.kept and dp is not None and tp is not None and dp != tp:
                states[("dp",)], states[("tp",)] = tp, dp
        chooser.settle()
        changed.append(chooser.choice.price())

    best = found().price()
    with patch.object(choose._Chooser, "turn_back", change_places):
        again = found().price()
    assert again == best < changed[0]
