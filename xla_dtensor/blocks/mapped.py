"""A function of blocks, called on each block of its operands, wherever they lie.

How an operand is cut into blocks follows from shapes alone, and all blocks are computed by the same
instructions on the same shapes; what their results are added up to is added in the order of a
binary tree. A mesh decides which device computes which blocks, and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from xla_dtensor.mesh import Frame

FEW, ROWS, MOST = 8, 128, 256
"""A dim has at most `FEW` blocks, or more where each has at least `ROWS` places, up to `MOST`."""


def count_of(size: int) -> int:
    """How many blocks a dim has: a power of two that divides its size."""
    most = min(max(FEW, size // ROWS), MOST)
    count = 1
    while count * 2 <= most and size % (count * 2) == 0:
        count *= 2
    return count


@dataclass(frozen=True)
class Cut:
    """Which dim of each operand and result is cut.

    Attributes:
        count: of blocks.
        operands: per operand the dim; None: each block is computed of all of it.
        results: per result the dim; None: blocks' results are added up.
    """

    count: int
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]


def best(ways: Sequence[tuple[int, Cut]]) -> Cut | None:
    """Of ways to cut an operation, with the sizes of the dims that they cut, the one with most
    blocks: of the longest dim, and one that isn't summed over, where several have as many. None
    where no dim can be cut."""
    found = [(cut.count, size, None not in cut.results, cut) for size, cut in ways]
    found = [each for each in found if each[0] > 1]
    return max(found, key=lambda each: each[:3])[-1] if found else None


def mapped(
    function: Callable[..., Sequence[jax.Array]],
    operands: Sequence[jax.Array],
    cut: Cut | None,
    frame: Frame | None,
) -> list[jax.Array]:
    """The results of ``function`` on each block, put together; or on all of its operands.

    Args:
        function: takes blocks of the operands, and gives results.
        cut: how they are cut; None: there is one block.
        frame: the devices; None for one.
    """
    axes = [] if frame is None or cut is None else _axes(frame, cut.count)
    sizes = {} if frame is None else {axis: frame.sizes[axis] for axis in axes}

    def run(*shards: jax.Array) -> list[jax.Array]:
        if cut is None:
            return _once(function, shards)
        local = cut.count // math.prod(sizes.values())
        results = _on_blocks(function, shards, cut, local)
        found = []
        for result, dim in zip(results, cut.results, strict=True):
            if dim is None:
                total = _tree(result)
                for axis in reversed(axes):  # neighbours first
                    total = _over_devices(total, axis, sizes[axis])
                found.append(total)
            else:
                found.append(_joined(result, dim))
        return found

    if frame is None:
        return run(*operands)

    def spec(dim: int | None) -> PartitionSpec:
        along: list[Any] = [] if dim is None else [*[None] * dim, tuple(axes) or None]
        return PartitionSpec(*along)

    whole = PartitionSpec()
    on_devices = jax.shard_map(
        run,
        mesh=frame.jax_mesh,
        in_specs=whole if cut is None else tuple(map(spec, cut.operands)),
        out_specs=whole if cut is None else [*map(spec, cut.results)],
        check_vma=False,
    )
    return list(on_devices(*operands))


def _axes(frame: Frame, count: int) -> list[str]:
    """The axes that share so many blocks out; along the others devices compute the same."""
    axes, product = [], 1
    for axis, size in frame.sizes.items():
        if count % (product * size) == 0:
            axes.append(axis)
            product *= size
    return axes


def _once(
    function: Callable[..., Sequence[jax.Array]], operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """A call that XLA can't take together with what is around it: fused, it may round otherwise.
    A loop keeps it apart, unless XLA writes the loop out, as it does where it runs once. So this
    one runs twice, and computes in the first round."""
    shapes = jax.eval_shape(function, *operands)
    nothing = [jnp.zeros(x.shape, x.dtype) for x in shapes]

    def round_of(i: Any, before: list[jax.Array]) -> list[jax.Array]:
        return list(lax.cond(i == 0, lambda _: [*function(*operands)], lambda x: x, before))

    return list(lax.fori_loop(0, 2, round_of, nothing))


def _on_blocks(
    function: Callable[..., Sequence[jax.Array]],
    shards: Sequence[jax.Array],
    cut: Cut,
    local: int,
) -> list[jax.Array]:
    """The results of this device's blocks, along a leading axis."""
    pairs = [*zip(shards, cut.operands, strict=True)]
    moving = [_blocks(shard, dim, local) for shard, dim in pairs if dim is not None]

    def one(blocks: Sequence[jax.Array]) -> list[jax.Array]:
        left = iter(blocks)
        return [*function(*(shard if dim is None else next(left) for shard, dim in pairs))]

    if local == 1:
        return [x[None] for x in _once(lambda *blocks: one(blocks), [x[0] for x in moving])]
    return list(lax.map(one, moving))


def _blocks(array: jax.Array, dim: int, count: int) -> jax.Array:
    """``[..., n, ...]`` as ``[count, ..., n / count, ...]``."""
    shape = array.shape
    parts = array.reshape(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])
    return jnp.moveaxis(parts, dim, 0)


def _joined(array: jax.Array, dim: int) -> jax.Array:
    """What `_blocks` has made, along ``dim`` again."""
    parts = jnp.moveaxis(array, 0, dim)
    shape = parts.shape
    return parts.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


def _tree(array: jax.Array) -> jax.Array:
    """The sum over the leading axis, of neighbours first."""
    while array.shape[0] > 1:
        array = array[::2] + array[1::2]
    return array[0]


def _over_devices(value: jax.Array, axis: str, size: int) -> jax.Array:
    """The sum over an axis, in the same order: a sum of two numbers is the same from both sides."""
    distance = 1
    while distance < size:
        pairs = [(i, i ^ distance) for i in range(size)]
        value = value + lax.ppermute(value, axis, pairs)
        distance *= 2
    return value
