"""Casts of a loop's slices, outside of the loop: where that is done, and that no value changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from torch import nn

import xla_dtensor as xd
from tests.conftest import make_mesh
from tests.planning.gpus import needs_gpu_compiler
from xla_dtensor.base import jax_private
from xla_dtensor.compilation.scan.casts import casts_outside

N, WIDTH = 3, 4
BF16 = jnp.bfloat16


def narrow(x: Any) -> Any:
    return x.astype(BF16)


def product(c: Any, w: Any) -> tuple[Any, Any]:
    return jnp.tanh(c @ narrow(w)), None


def behind_a_barrier(c: Any, w: Any) -> tuple[Any, Any]:
    c, w = jax.lax.optimization_barrier((c, w))
    return c @ narrow(w), None


def given_wide(c: Any, w: Any) -> tuple[Any, Any]:
    return c, (c.T @ (c @ narrow(w))).astype(jnp.float32)


def given_twice(c: Any, w: Any) -> tuple[Any, Any]:
    grad = (c @ narrow(w)).astype(jnp.float32)
    return c, (grad, grad)


def used_wide_as_well(c: Any, w: Any) -> tuple[Any, Any]:
    return c @ narrow(w) + w.sum().astype(BF16), None


def cast_to_whole_numbers(c: Any, w: Any) -> tuple[Any, Any]:
    return c + w.astype(jnp.int8).astype(BF16), None


def widened(c: Any, w: Any) -> tuple[Any, Any]:
    return c @ narrow(narrow(w).astype(jnp.float32) * 2), None


def to_another_of_16_bits(c: Any, w: Any) -> tuple[Any, Any]:
    return c, narrow(w).astype(jnp.float16).astype(jnp.float32)


# Which operands and results the loop has in bfloat16 then, besides what it carries.
CASES: dict[str, tuple[Callable[..., Any], str, list[str]]] = {
    "a product": (product, "bfloat16", []),
    "behind a barrier": (behind_a_barrier, "bfloat16", []),
    "given wide": (given_wide, "bfloat16", ["bfloat16"]),
    "given twice": (given_twice, "bfloat16", ["float32", "float32"]),
    "used wide as well": (used_wide_as_well, "float32", []),
    "cast to whole numbers": (cast_to_whole_numbers, "float32", []),
    "widened in between": (widened, "bfloat16", []),
    "to another of 16 bits": (to_another_of_16_bits, "bfloat16", ["float16"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_moved(name: str) -> None:
    body, taken, given = CASES[name]
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(N, WIDTH, WIDTH)), jnp.float32)
    start = jnp.asarray(np.random.default_rng(1).normal(size=(WIDTH, WIDTH)), BF16)
    closed = jax.make_jaxpr(lambda c, w: jax.lax.scan(body, c, w + 0))(start, weights)
    moved = casts_outside(closed.jaxpr)
    (loop,) = [e for e in moved.eqns if e.primitive.name == "scan"]
    assert str(loop.invars[-1].aval.dtype) == taken
    slices = loop.outvars[jax_private.loop_parts(loop)[1] :]
    assert [str(v.aval.dtype) for v in slices] == given
    before = jaxpr_as_fun(closed)(start, weights)
    after = jaxpr_as_fun(ClosedJaxpr(moved, closed.consts))(start, weights)
    for one, other in zip(before, after, strict=True):
        assert one.dtype == other.dtype
        # XLA needn't round what is cast to bfloat16 and back in one program. Between two it has to.
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=2**-7)


def test_what_the_step_is_given_is_not_there_twice() -> None:
    weights, start = jnp.zeros((N, WIDTH, WIDTH)), jnp.zeros((WIDTH, WIDTH), BF16)
    closed = jax.make_jaxpr(lambda c, w: jax.lax.scan(product, c, w))(start, weights)
    (loop,) = casts_outside(closed.jaxpr).eqns
    assert loop.invars[-1].aval.dtype == jnp.float32


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Any) -> Any:
        return (x @ self.weight.bfloat16()).tanh()


def test_a_step_casts_its_layers_before_their_loop() -> None:
    """What its operations do in the loop's body is seen: they are equations there, not calls."""
    layers = nn.ModuleList(Layer(WIDTH) for _ in range(N)).to("xla").requires_grad_(False)
    x = torch.randn(WIDTH, WIDTH).bfloat16().to("xla")
    step = xd.compile(lambda x: xd.scan_layers(layers)(x))
    jaxpr = casts_outside(step.looked_at((x,), {}, lambda program: program.jaxpr))
    (loop,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    stacked = [v.aval.dtype for v in loop.invars if v.aval.shape == (N, WIDTH, WIDTH)]
    assert stacked == [BF16]


@needs_gpu_compiler  # XLA's CPU compiler has no bfloat16, and computes with float32
def test_a_loop_needs_its_layers_once_more_in_bfloat16_alone() -> None:
    """Parameters and gradients of 8 layers, each of 128 x 1024 on a device: stacked for the loops,
    in two bytes each."""
    with xd.abstract("h100:1x8"):
        mesh = make_mesh("8")
        layers = nn.ModuleList(Layer(1024) for _ in range(8))
        xd.distribute_module(layers, mesh, lambda name, module, mesh: shard(module, mesh))
        x = xd.distribute_tensor(torch.randn(8, 1024), mesh, [xd.Replicate()]).bfloat16()

        def step(x: Any) -> None:
            xd.scan_layers(layers)(x).float().sum().backward()
            with torch.no_grad():
                for p in layers.parameters():
                    p.sub_(p.grad)
                    p.grad = None

        report = xd.plan(step, x)
    each = 8 * 128 * 1024
    assert report.memory.arguments is not None and report.memory.arguments >= 4 * each
    assert report.memory.temporaries < 2 * 2 * each + 2**21


def shard(module: nn.Module, mesh: Any) -> None:
    for name, p in list(module.named_parameters(recurse=False)):
        laid_out = xd.distribute_tensor(p.data, mesh, [xd.Shard(1)])
        module.register_parameter(name, nn.Parameter(laid_out))
