"""Functions computed on each shard alone: right in any layout, silent in that of the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xla_dtensor.debug.communication import collectives
from xla_dtensor.lowering.partitioned.per_slice import elementwise, per_slice

SIZE = 10


def counted(index: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``values`` summed by ``index`` in each row, and the largest index of each."""
    hits = index[..., None] == jnp.arange(SIZE)
    return jnp.sum(jnp.where(hits, values[..., None], 0), axis=-2), jnp.max(index, axis=-1)


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    shape = (count, 6)
    return rng.integers(0, SIZE, shape), rng.integers(0, 9, shape).astype(np.float32)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("count", [16, 13])
@pytest.mark.parametrize("given", [P("a"), P(("b", "a")), P("a", "b"), P()], ids=str)
@pytest.mark.parametrize("wanted", [P("a"), P(None, "b"), P(("b", "a")), P()], ids=str)
def test_numbers_are_right_in_any_layout(count: int, given: P, wanted: P, mesh: Mesh) -> None:
    def laid_out(index: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        constrain = jax.lax.with_sharding_constraint
        given_sharding = NamedSharding(mesh, given)
        index, values = constrain(index, given_sharding), constrain(values, given_sharding)
        total, last = per_slice(counted, 1, index, values)
        return constrain(total, NamedSharding(mesh, wanted)), last

    index, values = rows(count)
    total, last = jax.jit(laid_out)(index, values)
    expected = np.zeros((count, SIZE), np.float32)
    for i, (indices, row) in enumerate(zip(index, values, strict=True)):
        np.add.at(expected[i], indices, row)
    np.testing.assert_array_equal(total, expected)
    np.testing.assert_array_equal(last, index.max(axis=1))


@pytest.mark.parametrize("layout", [P("a"), P("b"), P(("a", "b")), P(("b", "a"))], ids=str)
def test_a_sharded_batch_is_silent(layout: P, mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, layout)
    arrays = [jax.device_put(x, sharding) for x in rows(16)]
    program = jax.jit(lambda *x: per_slice(counted, 1, *x)).lower(*arrays).compile()
    assert not collectives(program.as_text())
    assert all(s.is_equivalent_to(sharding, 2) for s in program.output_shardings[:1])


def test_each_device_ends_its_own_loop(mesh: Mesh) -> None:
    def halved(x: jax.Array) -> jax.Array:
        more = lambda x: jnp.any(x >= 1)
        return jax.lax.while_loop(more, lambda x: jnp.where(x >= 1, x / 2, x), x)

    def texts(function: object) -> dict[str, int]:
        return collectives(jax.jit(function).lower(x).compile().as_text())

    x = jax.device_put(np.arange(32, dtype=np.float32), NamedSharding(mesh, P("a")))
    assert texts(halved)  # as one loop of all devices
    assert not texts(lambda x: elementwise(halved, x))
    np.testing.assert_array_equal(jax.jit(lambda x: elementwise(halved, x))(x), halved(x))


def test_xla_may_cut_a_mesh_dim_apart() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("a",))
    x = jax.device_put(np.arange(24, dtype=np.int32), NamedSharding(mesh, P("a")))
    # The 8 devices of the one mesh dim become 2 x 4.
    cut = jax.jit(
        lambda x: elementwise(jnp.gcd, x.reshape(2, 4, 3) * 2, x.reshape(2, 4, 3) + 1).reshape(24)
    )
    np.testing.assert_array_equal(cut(x), np.gcd(np.arange(24) * 2, np.arange(24) + 1))
    assert not collectives(cut.lower(x).compile().as_text())


def test_vmap() -> None:
    index, values = rows(12)
    index, values = index.reshape(3, 4, 6), values[:4]
    mapped = jax.vmap(lambda i, v: per_slice(counted, 1, i, v), in_axes=(0, None))
    for i, (total, last) in enumerate(zip(*mapped(index, values), strict=True)):
        np.testing.assert_array_equal(total, counted(index[i], values)[0])
        np.testing.assert_array_equal(last, index[i].max(axis=1))


def test_without_leading_dims() -> None:
    assert elementwise(jnp.gcd, jnp.int32(12), jnp.int32(18)) == 6
