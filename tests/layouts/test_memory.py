"""Layouts under a limit of memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import Tensor, nn

import xla_dtensor as xd
from tests.conftest import make_mesh
from tests.layouts.test_step import Transformer, build, losses
from xla_dtensor.layouts.graph import Graph
from xla_dtensor.layouts.memory import TAKEN_FOR_ALIVE, Alive

LAYERS, WIDTH, ROWS = 6, 64, 2048


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.down(torch.relu(self.up(x))))


def gradients(x: Tensor, model: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(x).square().mean(), list(model.parameters()))


def run(limit: float | None) -> tuple[int, list[Tensor]]:
    """The temporaries of a step whose weights are cut as Megatron cuts them, and its results."""
    mesh = make_mesh("8")
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    for layer in model:
        for linear, dim in ((layer.up, 0), (layer.down, 1)):
            placed = xd.distribute_tensor(linear.weight.data, mesh, [xd.Shard(dim)])
            linear.weight = nn.Parameter(placed)
        layer.down.bias = nn.Parameter(
            xd.distribute_tensor(layer.down.bias.data, mesh, [xd.Replicate()])
        )
    x = xd.distribute_tensor(torch.randn(ROWS, WIDTH), mesh, [xd.Replicate()])
    step = xd.compile(lambda x: gradients(x, model))
    with xd.config.override(device_memory=limit):
        results = step(x)
    (program,) = step.compiled_programs()
    return program.memory_analysis().temp_size_in_bytes, [r.full_tensor().cpu() for r in results]


def expected() -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    return [*gradients(torch.randn(ROWS, WIDTH), model)]


def test_what_is_kept_for_the_backward_pass_is_cut_if_there_is_no_room_for_it() -> None:
    rows = ROWS * WIDTH * 4
    free, _ = run(None)
    short, results = run(LAYERS * rows / 2)
    assert short < 0.7 * free
    for found, wanted in zip(results, expected(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_too_little_for_any_layout_is_no_error() -> None:
    _, results = run(1000.0)
    for found, wanted in zip(results, expected(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2e4, pytest.param(1e5, marks=pytest.mark.slow)])
def test_a_transformer(limit: float) -> None:
    torch.manual_seed(0)
    wanted, _ = losses(Transformer(), lambda tokens: tokens)
    with xd.config.override(device_memory=limit):
        found, _ = losses(*build("tp", "2x4"), layouts="step")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_is_alive() -> None:
    """Counted by hand: where the second product is made there are the input, both products and
    what the last line takes."""

    def function(x: Any) -> Any:
        a = jnp.tanh(x @ x)  # 8 x 8
        b = a @ x
        return a.sum() + (b + jnp.zeros((8, 8))).sum()

    ones = jnp.ones((8, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda: function(ones))().jaxpr
    (x,) = jaxpr.constvars
    graph = Graph(jaxpr, {x: (("a",), ())}, [None], {"a": 4})
    alive = Alive(jaxpr, graph)
    one = 8 * 8 * 4
    nbytes, groups = alive.most(lambda group: 1.0)
    assert nbytes == pytest.approx(one + 2 * one * TAKEN_FOR_ALIVE)
    assert sum(groups.values()) == pytest.approx(nbytes)
    cut, _ = alive.most(lambda group: 0.25)
    assert cut == pytest.approx(nbytes / 4)
