"""A defect of XLA's SPMD partitioner on meshes of three axes, and that it doesn't reach users.

For some shardings the partitioner computes the blocks of a matrix product in one device order and
labels them in another. Matrix products of such meshes are therefore pinned
(`dispatch/result_placements.py`).
"""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh


@pytest.mark.xfail(strict=True, reason="XLA's partitioner; when this passes the pins can go")
def test_xla_itself() -> None:
    make_mesh("2x2x2")  # starts the devices
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("pp", "dp", "tp"))

    def place(x: np.ndarray, *spec: str) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    a = (np.arange(24 * 32, dtype=np.float32) % 7).reshape(24, 32)
    b = (np.arange(32 * 16, dtype=np.float32) % 5).reshape(32, 16)
    out = NamedSharding(mesh, PartitionSpec(("dp", "tp"), "pp"))
    product = jax.jit(lambda a, b: a @ b, out_shardings=out)
    np.testing.assert_array_equal(product(place(a, "tp", "pp"), place(b, "pp", "tp")), a @ b)


def placements(rng: random.Random, ndim: int) -> list:
    return [rng.choice([Replicate(), *(Shard(d) for d in range(ndim))]) for _ in range(3)]


OPERATIONS = {
    "mm": (lambda x, w: x @ w, (24, 32), (32, 16)),
    "linear": (lambda x, w: torch.nn.functional.linear(x, w), (4, 6, 32), (16, 32)),
    "bmm": (torch.bmm, (4, 24, 8), (4, 8, 16)),
    "addmm": (lambda x, w: torch.addmm(torch.ones(16), x, w), (24, 32), (32, 16)),
    "attention": (
        lambda q, k: torch.nn.functional.scaled_dot_product_attention(q, k, k),
        (4, 4, 8, 8),
        (4, 4, 8, 8),
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", list(OPERATIONS))
@pytest.mark.parametrize("seed", range(12))
def test_products_whose_results_are_resharded(name: str, seed: int) -> None:
    """Forward and backward, with the layouts of operands, result and gradients drawn at random."""
    rng = random.Random(f"{name} {seed}")
    function, *shapes = OPERATIONS[name]
    mesh = make_mesh("2x2x2")
    values = [torch.randint(-3, 4, shape).float() for shape in shapes]
    leaves = [v.clone().requires_grad_() for v in values]
    expected = function(*leaves)
    expected.tanh().sum().backward()

    sharded = [distribute_tensor(v, mesh, placements(rng, v.ndim)).requires_grad_() for v in values]
    wanted = [placements(rng, len(shape)) for shape in (expected.shape, *shapes)]

    @xd.compile
    def step(*tensors: torch.Tensor) -> list[torch.Tensor]:
        out = function(*tensors).redistribute(placements=wanted[0])
        grads = torch.autograd.grad(out.tanh().sum(), tensors)
        return [
            out.detach(),
            *(g.redistribute(placements=p) for g, p in zip(grads, wanted[1:], strict=True)),
        ]

    out, *grads = step(*sharded)
    torch.testing.assert_close(out.cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    for actual, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(actual.cpu(), leaf.grad, rtol=1e-5, atol=1e-5)
