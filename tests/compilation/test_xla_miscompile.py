"""Defects of XLA's SPMD partitioner in matrix products, and that they don't reach users.

On three axes it computes, for some shardings, the blocks of a product in one device order and
labels them in another: products of such meshes are pinned. On two axes of different sizes it takes
the wrong batches if a result is wanted with the contraction's axis on the batch dim, and the
batch's axis elsewhere: results of products hold their axes (`plans/result_placements.py`).
"""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd
from tests.compilation.random_products import OPERATIONS, check, placements
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


@pytest.mark.xfail(strict=True, reason="XLA's partitioner; when this passes holding can go")
def test_xla_itself_on_two_axes() -> None:
    make_mesh("4x2")  # starts the devices
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("dp", "tp"))
    place = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("tp", "dp")))
    x = (np.arange(8 * 16 * 8, dtype=np.float32) % 7).reshape(8, 16, 8)
    out = NamedSharding(mesh, PartitionSpec("dp", "tp"))
    product = jax.jit(lambda x: jnp.einsum("bki,bkj->bij", x, x), out_shardings=out)
    np.testing.assert_array_equal(product(place(x)), np.einsum("bki,bkj->bij", x, x))


CROSSED = {
    # The batch on one mesh dim, the contraction on the other; wanted with these swapped.
    "rows": ((2, 0), (1, 0), (0, 1)),
    "columns": ((2, 0), (1, 0), (0, 2)),
    "other rows": ((0, 2), (0, 1), (1, 0)),
    "other columns": ((0, 2), (0, 1), (2, 0)),
}
BATCHED = {
    "bmm": torch.bmm,
    "matmul": torch.matmul,
    "einsum": lambda x, y: torch.einsum("bik,bkj->bij", x, y),
    "baddbmm": lambda x, y: torch.baddbmm(x.new_ones(1), x, y),
    "baddbmm_": lambda x, y: torch.bmm(x, y).zero_().baddbmm_(x, y),
    "bmm.out": lambda x, y: torch.bmm(x.detach(), y.detach(), out=torch.bmm(x, y).detach()),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("shape", ["2x4", "4x2", "2x3"])
@pytest.mark.parametrize("crossed", CROSSED)
@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_batches_that_change_places_with_the_contraction(
    shape: str, crossed: str, name: str, compiled: bool
) -> None:
    mesh = make_mesh(shape)
    of_x, of_y, wanted = (tuple(map(Shard, dims)) for dims in CROSSED[crossed])
    x = torch.randint(-3, 4, (12, 12, 24)).float()
    y = torch.randint(-3, 4, (12, 24, 12)).float()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return BATCHED[name](x, y).redistribute(placements=wanted)

    run = xd.compile(step) if compiled else step
    out = run(distribute_tensor(x, mesh, of_x), distribute_tensor(y, mesh, of_y))
    torch.testing.assert_close(out.cpu(), BATCHED[name](x, y), rtol=0, atol=0)


NAMES = ("mm", "linear", "bmm", "addmm", "attention")


@pytest.mark.parametrize("shape", ["2x4", "4x2", "2x3"])
@pytest.mark.parametrize("crossed", CROSSED)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_they_are_added_to_lies_crossed(shape: str, crossed: str, compiled: bool) -> None:
    """The product is no result of the operation then, but is wanted as what it is added to lies."""
    mesh = make_mesh(shape)
    size = 24 if shape == "2x3" else 8
    values = [torch.randint(-3, 4, (size, size, size)).float() for _ in range(3)]
    left, right, added = (tuple(map(Shard, dims)) for dims in CROSSED[crossed])
    tensors = [
        distribute_tensor(v, mesh, where)
        for v, where in zip(values, (added, left, right), strict=True)
    ]
    function = xd.compile(torch.baddbmm) if compiled else torch.baddbmm
    found = function(*tensors).full_tensor().cpu()
    torch.testing.assert_close(found, torch.baddbmm(*values), rtol=0, atol=0)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(12))
def test_products_whose_results_are_resharded(name: str, seed: int) -> None:
    """Forward and backward, with the layouts of operands, result and gradients drawn at random."""
    check(make_mesh("2x2x2"), name, seed, (0, 1, 2), drawn_by=f"{name} {seed}")


@pytest.mark.one_in(10)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("seed", range(6))
def test_products_on_two_axes(name: str, seed: int) -> None:
    check(make_mesh("4x2"), name, seed, (0, 1))


IN_PLACE = {
    "addmm_": ((8, 16), (8, 24), (24, 16)),
    "baddbmm_": ((4, 8, 16), (4, 8, 24), (4, 24, 16)),
    "addbmm_": ((8, 16), (4, 8, 24), (4, 24, 16)),
    "addmv_": ((8,), (8, 16), (16,)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", ["2x4", "2x2x2"])
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("seed", range(3))
def test_products_in_place(shape: str, name: str, seed: int) -> None:
    mesh = make_mesh(shape)
    rng = random.Random(f"{name} {seed}")
    values = [torch.randint(-3, 4, size).float() for size in IN_PLACE[name]]
    own, *factors = (
        distribute_tensor(v, mesh, placements(rng, v.ndim, tuple(range(mesh.ndim)))) for v in values
    )
    getattr(own, name)(*factors)
    expected = getattr(values[0].clone(), name)(*values[1:])
    torch.testing.assert_close(own.full_tensor().cpu(), expected, rtol=0, atol=0)
