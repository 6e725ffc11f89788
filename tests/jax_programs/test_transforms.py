"""Torch modules under JAX's transformations: the numbers are those of torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

import xla_dtensor as xd

from .cases import MODULES, made

NAMES = sorted(MODULES)
# Each row of a batch by itself gives other numbers: these look at the whole batch.
OF_BATCHES = {"held back"}


class Expected:
    """A module on the CPU: its result, and the gradients of a sum of it with random weights."""

    def __init__(self, name: str) -> None:
        self.module, self.inputs = made(name)
        self.differentiable = self.inputs[0].is_floating_point()
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in self.inputs]
        out = self.module(*given)
        self.out = out.detach().numpy()
        self.weights = torch.randn_like(out)
        (out * self.weights).sum().backward()
        self.gradients = {
            name: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()
            for name, p in self.module.named_parameters()
        }
        self.by_inputs = [x.grad.numpy() for x in given if x.grad is not None]
        self.arrays = [jnp.asarray(x.numpy()) for x in self.inputs]
        self.params, self.apply = xd.jax.from_module(self.module)

    def loss(self, params: Any, *arrays: Any) -> Any:
        return (self.apply(params, *arrays) * self.weights.numpy()).sum()

    def argnums(self) -> tuple[int, ...]:
        count = len(self.inputs) if self.differentiable else 0
        return tuple(range(1 + count))

    def check(self, gradients: Any) -> None:
        by_params, *by_inputs = gradients
        close(by_params, self.gradients)
        close(by_inputs, self.by_inputs)


def close(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    got_leaves, got_tree = jax.tree.flatten(got)
    leaves, tree = jax.tree.flatten(wanted)
    assert got_tree == tree
    for x, y in zip(got_leaves, leaves, strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=NAMES)
def expected(request: pytest.FixtureRequest) -> Expected:
    return Expected(request.param)


def test_called(expected: Expected) -> None:
    close(expected.apply(expected.params, *expected.arrays), expected.out)


def test_jit(expected: Expected) -> None:
    close(jax.jit(expected.apply)(expected.params, *expected.arrays), expected.out)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("jit", [False, True])
def test_grad(expected: Expected, jit: bool) -> None:
    gradient = jax.grad(expected.loss, argnums=expected.argnums())
    found = (jax.jit(gradient) if jit else gradient)(expected.params, *expected.arrays)
    expected.check(found)


@pytest.mark.one_in(8)
def test_checkpoint(expected: Expected) -> None:
    loss = jax.checkpoint(expected.loss)
    expected.check(
        jax.jit(jax.grad(loss, argnums=expected.argnums()))(expected.params, *expected.arrays)
    )


def _rows(expected: Expected, params: Any, *arrays: Any) -> Any:
    """Each row of the batch as a batch of its own."""
    one = lambda *rows: expected.apply(params, *(row[None] for row in rows))[0]
    return jax.vmap(one)(*arrays)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_BATCHES])
def test_vmap(name: str) -> None:
    expected = Expected(name)
    close(jax.jit(lambda *a: _rows(expected, *a))(expected.params, *expected.arrays), expected.out)

    def loss(params: Any, *arrays: Any) -> Any:
        return (_rows(expected, params, *arrays) * expected.weights.numpy()).sum()

    expected.check(jax.grad(loss, argnums=expected.argnums())(expected.params, *expected.arrays))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_BATCHES])
def test_scan(name: str) -> None:
    expected = Expected(name)

    def loss(params: Any, *arrays: Any) -> Any:
        def body(total: Any, row: Any) -> Any:
            *inputs, weights = row
            out = expected.apply(params, *(x[None] for x in inputs))[0]
            return total + (out * weights).sum(), out

        rows = (*arrays, jnp.asarray(expected.weights.numpy()))
        total, outs = jax.lax.scan(body, jnp.zeros(()), rows)
        return total, outs

    gradient = jax.jit(jax.grad(loss, argnums=expected.argnums(), has_aux=True))
    found, outs = gradient(expected.params, *expected.arrays)
    close(outs, expected.out)
    expected.check(found)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_BATCHES])
def test_shard_map(name: str, checks: bool) -> None:
    expected = Expected(name)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("dp",))

    def local(params: Any, weights: Any, *arrays: Any) -> Any:
        out = expected.apply(params, *arrays)
        return jax.lax.psum((out * weights).sum(), "dp")

    def loss(params: Any, *arrays: Any) -> Any:
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), *[P("dp")] * (1 + len(arrays))),
            out_specs=P(),
            check_vma=checks,
        )
        return mapped(params, jnp.asarray(expected.weights.numpy()), *arrays)

    gradient = jax.jit(jax.grad(loss, argnums=expected.argnums()))
    expected.check(gradient(expected.params, *expected.arrays))


SMOOTH = [
    *("linear", "attention", "autograd function", "DFunction", "in place", "views"),
    *("held back", "forces", "checkpoint", "hook", "weight norm"),
]


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_of_gradients(name: str) -> None:
    """As torch has them: through an autograd function, by its backward's own operations."""
    expected = Expected(name)
    x = expected.inputs[0].clone().requires_grad_()
    rest = expected.inputs[1:]

    def penalty_of_torch() -> torch.Tensor:
        out = (expected.module(x, *rest) * expected.weights).sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return gradient.pow(2).sum() + 0 * x.sum()

    expected.module.zero_grad()
    penalty_of_torch().backward()
    wanted = {
        n: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()
        for n, p in expected.module.named_parameters()
    }
    assert x.grad is not None

    def penalty(params: Any, first: Any) -> Any:
        gradient = jax.grad(expected.loss, argnums=1)(params, first, *expected.arrays[1:])
        return (gradient**2).sum()

    found = jax.jit(jax.grad(penalty, argnums=(0, 1)))(expected.params, expected.arrays[0])
    close(found, (wanted, x.grad.numpy()), 1e-4)


def test_gradients_of_third_order() -> None:
    x = torch.tensor(1.5, requires_grad=True)
    function: Callable[[torch.Tensor], torch.Tensor] = lambda x: torch.nn.functional.softplus(x**3)
    wanted = function(x)
    for _ in range(3):
        (wanted,) = torch.autograd.grad(wanted, x, create_graph=True)
    third: Any = lambda x: xd.jax.call(function, x)
    for _ in range(3):
        third = jax.grad(third)
    assert float(jax.jit(third)(1.5)) == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize(
    "name", ["linear", "autograd function", pytest.param("lstm", marks=pytest.mark.slow)]
)
def test_jacobians(name: str) -> None:
    expected = Expected(name)
    x = expected.inputs[0]
    wanted = torch.autograd.functional.jacobian(expected.module, x)
    found = jax.jit(jax.jacrev(expected.apply, argnums=1))(expected.params, expected.arrays[0])
    close(found, wanted.numpy())


def test_forward_mode_is_refused() -> None:
    expected = Expected("linear")
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(
            lambda x: expected.apply(expected.params, x),
            (expected.arrays[0],),
            (expected.arrays[0],),
        )
