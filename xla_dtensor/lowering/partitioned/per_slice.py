"""Calls functions shard by shard where XLA's partitioner can't see that they need no communication.

- A loop that runs until every element has converged has one condition for all of them, and XLA
  makes the devices agree on it: an all-reduce in each round. Each device can stop by itself.
- A scatter in batches by full coordinates (`scatter.py`) could go anywhere, as far as XLA knows:
  it gathers what is scattered. Each device can as well scatter the batches that it has.

So the function becomes a call that XLA cuts into one call per device (`custom_partitioning`). Where
the compiler has no such calls (TPUs, `workarounds.CALLS_PER_SHARD`) an operation of `Kind.SLICED`
is called with shards (`plans/shard_map_call.py`). Of uneven shards, or others' layouts, it stays as
it is: right, with the communication that XLA finds necessary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh

from xla_dtensor.base.jax_private import hlo_sharding_of
from xla_dtensor.lowering.context import here
from xla_dtensor.lowering.partitioned.named import Partition
from xla_dtensor.lowering.partitioned.scatter import is_inside
from xla_dtensor.lowering.workarounds import CALLS_PER_SHARD

Function = Callable[..., Any]


def elementwise(function: Function, *operands: jax.Array) -> jax.Array:
    """``function(*operands)``, computed on each shard alone, without communication.

    Args:
        function: gives an array of the shape of its arguments, each element from the elements of
            the arguments at the same place. It is called with arrays of any one shape.
        operands: broadcast to one shape; of any dtypes.
    """
    arrays = jnp.broadcast_arrays(*operands)
    result: jax.Array = per_slice(function, arrays[0].ndim, *arrays)
    return result


def per_slice(function: Function, lead: int, *operands: jax.Array) -> Any:
    """``function(*operands)``, with the leading dims as they are sharded, without communication.

    Args:
        function: gives an array or a tuple of arrays. Operands and results have the same leading
            dims, and each slice of them is computed alone. It is called with leading dims of any
            number and size. No `jnp.argmax`: XLA asks for the shards' program in a thread of its
            own, where 64-bit types are off, and what lowers by them fails. `lax.argmax` is fine.
        lead: the number of leading dims. All other dims come whole.
        operands: of any dtypes.
    """
    if lead == 0 or any(axes for tensor in here().axes for axes in tensor):
        return function(*operands)  # nothing to cut, or cut already
    # What pads an uneven last shard can be anything, and anything may never converge.
    inside = is_inside(operands[0].shape[:lead])
    filled = [
        jnp.where(inside.reshape(*inside.shape, *[1] * (x.ndim - lead)), x, jnp.ones((), x.dtype))
        for x in operands
    ]
    call = custom_vmap(
        lambda *arrays: CALLS_PER_SHARD.choose(
            lambda *arrays: _partitioned(function, lead, arrays), function, *arrays
        )
    )

    def over_batch(_: int, are_batched: Sequence[bool], *arrays: jax.Array) -> Any:
        pairs = list(zip(arrays, are_batched, strict=True))
        size = next(x.shape[0] for x, is_batched in pairs if is_batched)
        whole = [x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in pairs]
        results = per_slice(function, lead + 1, *whole)
        return results, jax.tree.map(lambda _: True, results)

    call.def_vmap(over_batch)
    return call(*filled)


def _partitioned(function: Function, lead: int, operands: Sequence[jax.Array]) -> Any:
    results, tree = jax.tree.flatten(jax.eval_shape(function, *operands))
    ranks = [x.ndim for x in operands]
    # Of one rank, so that one sharding is that of them all.
    rank = max(*ranks, *(x.ndim for x in results))

    def on_shards(*shards: jax.Array) -> tuple[jax.Array, ...]:
        # XLA also calls this when it partitions the program, and the lowering is long over.
        with jax.enable_x64(True):
            own = [x.reshape(x.shape[:n]) for x, n in zip(shards, ranks, strict=True)]
            return tuple(_of_rank(x, rank) for x in jax.tree.leaves(function(*own)))

    def partition(mesh: Mesh, arguments: Any, results: Any) -> Any:
        sharding = _only_leading(results[0].sharding, lead, mesh)
        shardings = (sharding,) * len(arguments), (sharding,) * len(results)
        return mesh, on_shards, shardings[1], shardings[0]

    def dims(array: int) -> str:
        # Arrays share the leading dims only.
        return " ".join(f"d{i}" if i < lead else f"d{i}of{array}" for i in range(rank))

    names = [dims(i) for i in range(len(operands) + len(results))]
    rule = f"{', '.join(names[: len(operands)])} -> {', '.join(names[len(operands) :])}"
    arrays = [_of_rank(x, rank) for x in operands]
    call = custom_partitioning(on_shards)
    named = Partition(partition, on_shards, arrays, f"{lead} of {rule}")
    call.def_partition(
        named,
        sharding_rule=rule,
        need_replication_factors=tuple(
            f"d{i}of{array}" for array in range(len(names)) for i in range(lead, rank)
        ),
        # Where XLA cuts a mesh dim apart, the mesh has no names for a sharding.
        decode_shardings=False,
    )

    def called(*arrays: jax.Array) -> Any:
        return call(*arrays)

    # Programs' texts have the address alone, which a later function may have again: JAX's cache on
    # disk would give an eager operation the program of another one.
    called.__name__ = f"partitioned_{named.name}"
    found = jax.jit(called)(*arrays)
    return tree.unflatten([x.reshape(like.shape) for x, like in zip(found, results, strict=True)])


def _of_rank(x: jax.Array, rank: int) -> jax.Array:
    return x.reshape(*x.shape, *[1] * (rank - x.ndim))


def _only_leading(sharding: Any, lead: int, mesh: Mesh) -> Any:
    """A `GSPMDSharding` with the dims after the leading ones whole: tiles of those become copies,
    on the devices that come last in the order of the tiles as they are."""
    tiled = hlo_sharding_of(sharding).to_proto()
    tiles = list(tiled.tile_assignment_dimensions)
    copies = math.prod(tiles[lead:])
    if copies == 1:
        return sharding
    rank = len(tiles) - tiled.replicate_on_last_tile_dim
    tiled.tile_assignment_dimensions = [*tiles[:lead], *[1] * (rank - lead), copies]
    tiled.replicate_on_last_tile_dim = True
    return type(sharding)(list(mesh.devices.flat), tiled)
