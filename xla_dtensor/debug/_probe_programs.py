"""Small JAX programs that test what a backend can do, each with numpy's result to compare with.

Most numbers are small whole ones, which every dtype has exactly: whatever order a device adds in,
and in however few digits it multiplies, the result is that of numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import serialize_executable
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xla_dtensor.base.random import threefry
from xla_dtensor.mesh.memories import HOST

AXIS = "d"
"""The one dim of the mesh: all devices of the platform."""

Program = Callable[[Mesh], tuple[list[Any], list[Any]]]
"""Gives what the devices of a mesh compute, and what is right."""


def placed(mesh: Mesh, *inputs: Any) -> list[jax.Array]:
    """On all devices, cut along the first dim where they divide it, whole on each elsewhere."""
    specs = [P(AXIS) if x.ndim and x.shape[0] % mesh.size == 0 else P() for x in inputs]
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(inputs, specs, strict=True)]


def run(mesh: Mesh, function: Callable[..., Any], *inputs: Any) -> list[Any]:
    """The results of one compiled program."""
    results = jax.jit(function)(*placed(mesh, *inputs))
    return [np.asarray(x) for x in jax.tree.leaves(results)]


def numbers(mesh: Mesh, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Whole numbers from -5 to 5, with four rows for each device."""
    size = (4 * mesh.size, *shape)
    return (np.arange(np.prod(size)) * 7 % 11 - 5).reshape(size).astype(dtype)


def same(function: Callable[..., Any], dtype: Any, *shape: int) -> Program:
    """What means the same to numpy as to JAX, of numbers of a dtype."""

    def program(mesh: Mesh) -> tuple[list[Any], list[Any]]:
        x = numbers(mesh, *(shape or (6,)), dtype=dtype)
        return run(mesh, function, x), [np.asarray(function(x))]

    return program


# --- random numbers ------------------------------------------------------------------------------


def known_threefry(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    got, right = threefry.known_answers()
    return [got], [right]


def random_bits(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    """Cut over the devices, each position has the bits that it has on one."""
    cut = NamedSharding(mesh, P(AXIS))
    words = np.array([17, 29], np.uint32)

    def draw(words: Any) -> Any:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.bits(key, (4 * mesh.size, 6), "uint32")

    with jax.threefry_partitionable(True):
        got = jax.jit(draw, out_shardings=cut)(words)
    return [np.asarray(got)], [threefry.bits((17, 29), got.size).reshape(got.shape)]


# --- dtypes --------------------------------------------------------------------------------------


def close_to_one(dtype: Any) -> Program:
    """Numbers that single precision can't tell from 1."""

    def program(mesh: Mesh) -> tuple[list[Any], list[Any]]:
        x = 1 + numbers(mesh, 6, dtype=dtype) * 2.0**-40
        return run(mesh, lambda x: (x - 1) * 2.0**40, x), [(x - 1) * 2.0**40]

    return program


def large_integers(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    x = numbers(mesh, 6, dtype=np.int64)
    return run(mesh, lambda x: x * 2**40 + 3, x), [x * 2**40 + 3]


def truths(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    x = numbers(mesh, 6) > -5
    got = run(mesh, lambda x: (x.any(1), x.all(1), x.any(), x.all(0)), x)
    return got, [x.any(1), x.all(1), np.array(x.any()), x.all(0)]


def converted(dtype: Any) -> Program:
    """To a small dtype and back, with rounding."""

    def program(mesh: Mesh) -> tuple[list[Any], list[Any]]:
        x = numbers(mesh, 6) / 3
        to_and_back = lambda x: x.astype(dtype).astype(np.float32) * 2
        return run(mesh, to_and_back, x), [to_and_back(x)]

    return program


def dot(dtype: Any, result: Any = None) -> Program:
    """A product whose contracted dim is cut, so that the devices add up their parts."""

    def program(mesh: Mesh) -> tuple[list[Any], list[Any]]:
        a, b = numbers(mesh, 6), numbers(mesh, 5)
        if np.issubdtype(dtype, np.complexfloating):
            a, b = a + 1j * a[::-1], b - 2j * b
        kind = result or dtype
        product = lambda a, b: lax.dot_general(
            a, b, (((0,), (0,)), ((), ())), preferred_element_type=kind
        )
        wanted = (a.T @ b).astype(kind)
        return run(mesh, product, a.astype(dtype), b.astype(dtype)), [wanted]

    return program


# --- control flow --------------------------------------------------------------------------------


def conditional(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    x = numbers(mesh, 6)
    choose = lambda which, x: lax.switch(which, [lambda x: x + 1, lambda x: -x, jnp.abs], x)
    got = [r for i in range(3) for r in run(mesh, choose, np.int32(i), x)]
    return got, [x + 1, -x, abs(x)]


def loop(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    """How often it goes round depends on the numbers of all devices."""
    x = numbers(mesh, 6)

    def doubled(x: Any) -> Any:
        return lax.while_loop(lambda x: jnp.max(x) < 100, lambda x: x * 2, x)

    return run(mesh, doubled, x), [x * 32]


def scan(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    x = numbers(mesh, 6)
    step = lambda total, row: (total + row, total * 2)
    function = lambda x: lax.scan(step, jnp.zeros_like(x[:, 0]), x.T)
    totals = np.cumsum(x, 1).T
    before = np.concatenate([np.zeros_like(totals[:1]), totals[:-1]])
    return run(mesh, function, x), [totals[-1], before * 2]


# --- order, positions, sums ----------------------------------------------------------------------


def sort(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    """Along both dims, one of which is cut, and other numbers in the order of the keys."""
    x = numbers(mesh, 8)
    along = lambda dim: lambda x: lax.sort((x, lax.broadcasted_iota(np.int32, x.shape, dim)), dim)
    got = [r for dim in (0, 1) for r in run(mesh, along(dim), x)]
    orders = [np.argsort(x, dim, kind="stable").astype(np.int32) for dim in (0, 1)]
    return got, [r for dim in (0, 1) for r in (np.sort(x, dim), orders[dim])]


def top_k(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    x = numbers(mesh, 8)
    order = np.argsort(-x, 1, kind="stable")[:, :3].astype(np.int32)
    got = run(mesh, lambda x: lax.top_k(x, 3), x)
    return got, [np.take_along_axis(x, order, 1), order]


def gather(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    table, rows = numbers(mesh, 6), np.arange(8 * mesh.size) * 3 % (4 * mesh.size)
    return run(mesh, lambda t, i: jnp.take(t, i, axis=0, mode="clip"), table, rows), [table[rows]]


def scatter_add(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    table, rows = numbers(mesh, 6), np.arange(8 * mesh.size) // 2 * 3 % (4 * mesh.size)
    more = np.concatenate([table, -2 * table])
    right = table.copy()
    np.add.at(right, rows, more)
    return run(mesh, lambda t, i, x: t.at[i].add(x), table, rows, more), [right]


def dynamic_slice(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    x = numbers(mesh, 6)
    cut = lambda x, i: lax.dynamic_slice(x, (i, i), (3, 2))
    return run(mesh, cut, x, np.int32(1)), [x[1:4, 1:3]]


def dynamic_update(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    x = numbers(mesh, 6)
    right = x.copy()
    right[1:4, 1:3] = 9
    put = lambda x, i: lax.dynamic_update_slice(x, jnp.full((3, 2), 9, x.dtype), (i, i))
    return run(mesh, put, x, np.int32(1)), [right]


def running_sum(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    """As the package makes them: in strides, with a barrier that keeps XLA from undoing it."""
    x = numbers(mesh, 6)
    function = lambda dim: (
        lambda x: lax.optimization_barrier(lax.associative_scan(lax.add, x, axis=dim))
    )
    got = [r for dim in (0, 1) for r in run(mesh, function(dim), x)]
    return got, [np.cumsum(x, 0), np.cumsum(x, 1)]


def windows(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    x = numbers(mesh, 6)
    function = lambda x: lax.reduce_window(x, np.float32(0), lax.add, (1, 3), (1, 1), "VALID")
    return run(mesh, function, x), [np.lib.stride_tricks.sliding_window_view(x, 3, 1).sum(2)]


def convolution(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    x, kernel = numbers(mesh, 3, 8), (np.arange(18) % 5 - 2).reshape(2, 3, 3).astype(np.float32)
    found = np.lib.stride_tricks.sliding_window_view(x, 3, 2)
    right = np.einsum("nclk,ock->nol", found, kernel)
    return run(mesh, lambda x, k: lax.conv(x, k, (1,), "VALID"), x, kernel), [right]


def fourier(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    x = numbers(mesh, 16)
    return run(mesh, jnp.fft.fft, x), [np.fft.fft(x).astype(np.complex64)]


# --- linear algebra ------------------------------------------------------------------------------


def matrices(mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """Lower triangular matrices with a positive diagonal, and their products with themselves."""
    lower = np.tril(numbers(mesh, 4, 4) / 8, -1) + np.diag([1, 2, 3, 4]).astype(np.float32)
    return lower, lower @ lower.swapaxes(1, 2)


def cholesky(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    lower, product = matrices(mesh)
    return run(mesh, lax.linalg.cholesky, product), [lower]


def triangular_solve(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    (lower, _), x = matrices(mesh), numbers(mesh, 4, 2)
    solve = lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True)
    return run(mesh, solve, lower, lower @ x), [x]


def lu(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    _, a = matrices(mesh)
    a = a[:, ::-1]
    both, _, rows = run(mesh, lax.linalg.lu, a)
    found = (np.tril(both, -1) + np.eye(4, dtype=np.float32)) @ np.triu(both)
    return [found], [np.take_along_axis(a, rows[:, :, None], 1)]


def qr(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    _, a = matrices(mesh)
    q, r = run(mesh, lambda a: lax.linalg.qr(a, full_matrices=False), a)
    ones = np.broadcast_to(np.eye(4, dtype=np.float32), a.shape)
    return [q @ r, q.swapaxes(1, 2) @ q, np.tril(r, -1)], [a, ones, np.zeros_like(a)]


def eigh(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    _, a = matrices(mesh)
    vectors, values = run(mesh, lax.linalg.eigh, a)
    return [values, a @ vectors], [np.linalg.eigvalsh(a), vectors * values[:, None]]


def svd(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    _, a = matrices(mesh)
    a = a[:, ::-1]
    u, s, v = run(mesh, lax.linalg.svd, a)
    return [s, u * s[:, None] @ v], [np.linalg.svd(a, compute_uv=False), a]


def eig(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    _, a = matrices(mesh)
    a = a[:, ::-1]
    values, vectors = run(mesh, lambda a: lax.linalg.eig(a, compute_left_eigenvectors=False), a)
    ordered = np.sort_complex(np.linalg.eigvals(a)).astype(np.complex64)
    return [np.sort_complex(values), a @ vectors], [ordered, vectors * values[:, None]]


# --- several devices -----------------------------------------------------------------------------


def resharded(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    """From rows to columns, which the partitioner has to find a collective for."""
    x = numbers(mesh, 2 * mesh.size)
    columns = NamedSharding(mesh, P(None, AXIS))
    return run(mesh, lambda x: lax.with_sharding_constraint(x * 2, columns) + 1, x), [x * 2 + 1]


def uneven(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    """A dim that the devices don't divide is padded at the edges of a program, and cut inside."""
    x, rows = numbers(mesh, 6), NamedSharding(mesh, P(AXIS))
    length = 4 * mesh.size - 3

    def function(x: Any) -> Any:
        inside = lax.with_sharding_constraint(x[:length], rows)
        inside = lax.with_sharding_constraint(inside + inside.sum(0), rows)
        return jnp.pad(inside, ((0, 3), (0, 0)))

    right = x[:length] + x[:length].sum(0)
    return run(mesh, function, x), [np.pad(right, ((0, 3), (0, 0)))]


def on_each(function: Callable[..., Any], right: Callable[[np.ndarray], np.ndarray]) -> Program:
    """A collective under ``shard_map``. ``right`` is given the devices' values, one after the
    other, and gives what each has afterwards."""

    def program(mesh: Mesh) -> tuple[list[Any], list[Any]]:
        x = numbers(mesh, mesh.size, 2).reshape(mesh.size, 4 * mesh.size, 2)
        cut = jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
        wanted = right(x)
        return run(mesh, cut, x.reshape(-1, 2)), [wanted.reshape(-1, 2)]

    return program


def each_has_all(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x.reshape(1, -1, 2), (len(x), x[..., 0].size, 2))


def exchanged(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), len(x), -1, 2).swapaxes(0, 1)


def summed(x: Any) -> Any:
    return lax.pcast(lax.psum(x, AXIS), AXIS, to="varying")


def shift(x: Any) -> Any:
    count = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [(i, (i + 1) % count) for i in range(count)])


def custom_partitioned(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    """A function that XLA's partitioner asks Python how to cut."""
    call = custom_partitioning(lambda x: x * 2)

    def partition(mesh: Mesh, arguments: Any, result: Any) -> Any:
        shardings = tuple(x.sharding for x in arguments)
        return mesh, lambda x: x * 2, shardings[0], shardings

    call.def_partition(partition, sharding_rule="i j -> i j")
    x = numbers(mesh, 6)
    return run(mesh, call, x), [x * 2]


# --- memory, the host, files ---------------------------------------------------------------------


def donated(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    x = numbers(mesh, 6)
    (given,) = placed(mesh, x)
    result = jax.jit(lambda x: x + 1, donate_argnums=0)(given)
    if not given.is_deleted():
        raise RuntimeError("the result has memory of its own: a donated argument keeps its own")
    return [np.asarray(result)], [x + 1]


def host_memory(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    x = numbers(mesh, 6)
    (given,) = placed(mesh, x)
    away = jax.device_put(given, given.sharding.with_memory_kind(HOST))
    if away.sharding.memory_kind != HOST:
        raise RuntimeError(f"what was put into {HOST} is in {away.sharding.memory_kind}")
    back = jax.jit(lambda x: jax.device_put(x, given.sharding) + 1)(away)
    return [np.asarray(away), np.asarray(back)], [x, x + 1]


def callback(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    x = numbers(mesh, 6)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    function = lambda x: jax.pure_callback(lambda x: np.asarray(x) * 2, like, x + 1) + 1
    return run(mesh, function, x), [(x + 1) * 2 + 1]


def saved(mesh: Mesh) -> tuple[list[Any], list[Any]]:
    """Written down and read back."""
    x = numbers(mesh, 6)
    given = placed(mesh, x)
    compiled = jax.jit(lambda x: (x * 2).sum(0)).lower(*given).compile()
    payload, in_tree, out_tree = serialize_executable.serialize(compiled)
    devices = list(mesh.devices.flat)
    again = serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, devices[0].client, devices
    )
    return [np.asarray(again(*given))], [(x * 2).sum(0)]
