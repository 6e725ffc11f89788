"""Which layouts to check a call in, and what the rule claims of each."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tools.rule_check.samples import Like, Sample
from xla_dtensor.errors import PlacementError
from xla_dtensor.mesh.placements import dim_mesh_dims
from xla_dtensor.rules.alternatives import Merged
from xla_dtensor.rules.cost import redistribute_cost
from xla_dtensor.rules.infer import infer
from xla_dtensor.rules.merging import Placements, TensorInfo, shard_dim

DRAWS = 48
"""Layouts tried per call, from which the ones to check are picked."""


@dataclass(frozen=True)
class Claim:
    """A call's inputs laid out, and what the rule says of it."""

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    moves: str
    """Why the rule expects communication; empty if it expects none."""
    exact: bool
    """Whether the rule uses the inputs as they are: it need not even cut a replicated one."""


def claims(sample: Sample, mesh_shape: tuple[int, ...], free: int, moving: int) -> list[Claim]:
    """Up to `free` layouts for which the rule claims no communication, `moving` with some.

    The layouts are the same on every run. Most drawn ones need communication; those that the rule
    would bring the inputs to need none.
    """
    rng = random.Random(f"{sample}/{mesh_shape}")
    shapes = sample.result_shapes()
    found: dict[tuple[Placements, ...], Claim] = {}

    def add(inputs: Sequence[Placements]) -> Merged | None:
        merged = _infer(sample, inputs, shapes, mesh_shape)
        if merged is not None and tuple(inputs) not in found:
            why = moves(sample, inputs, merged, shapes, mesh_shape)
            exact = tuple(inputs) == merged.inputs
            found[tuple(inputs)] = Claim(tuple(inputs), merged.outputs, why, exact)
        return merged

    for inputs in _draws(sample.likes, mesh_shape, rng):
        merged = add(inputs)
        if merged is None:
            return []
        add(merged.inputs)
    silent = [c for c in found.values() if not c.moves and _sharded(c)]
    exact = _spread([c for c in silent if c.exact], free - 1)
    cut = _spread([c for c in silent if not c.exact], free - len(exact))
    some = [c for c in found.values() if c.moves and not _partial(c)]
    return exact + cut + _spread(some, moving)


def _infer(
    sample: Sample,
    inputs: Sequence[Placements],
    shapes: list[tuple[int, ...] | None],
    mesh_shape: tuple[int, ...],
) -> Merged | None:
    pairs = zip(sample.likes, inputs, strict=True)
    infos = [TensorInfo(like.shape, p, like.dtype) for like, p in pairs]
    args, kwargs = sample.filled(iter(infos))
    return infer(sample.func, args, kwargs, shapes, mesh_shape)


def _sharded(claim: Claim) -> bool:
    """A layout without shards can't but stay without communication."""
    return any(shard_dim(p) is not None for placements in claim.inputs for p in placements)


def _partial(claim: Claim) -> bool:
    """Where a partial value is only called so, XLA has nothing left to reduce."""
    return any(isinstance(p, Partial) for placements in claim.inputs for p in placements)


def _spread(items: list[Claim], count: int) -> list[Claim]:
    """`count` of `items`, evenly from all."""
    step = max(1, -(-len(items) // max(count, 1)))
    return items[::step][:count]


def _draws(
    likes: Sequence[Like], mesh_shape: tuple[int, ...], rng: random.Random
) -> Iterator[tuple[Placements, ...]]:
    """One tensor sharded over one or all mesh dims, for each of its dims; then at random."""
    whole: Placements = (Replicate(),) * len(mesh_shape)
    for at, like in enumerate(likes):
        for dim in _even_dims(like, mesh_shape):
            for placements in _of_dim(dim, mesh_shape):
                yield tuple(placements if i == at else whole for i in range(len(likes)))
    for _ in range(DRAWS):
        yield tuple(_draw(like, mesh_shape, rng) for like in likes)


def _of_dim(dim: int, mesh_shape: tuple[int, ...]) -> Iterator[Placements]:
    """`dim` over each mesh dim, and over all of them in both orders."""
    n = len(mesh_shape)
    for mesh_dim in range(n):
        yield tuple(Shard(dim) if m == mesh_dim else Replicate() for m in range(n))
    if n > 1:
        yield (Shard(dim),) * n
    if n == 2:
        yield (_StridedShard(dim, split_factor=mesh_shape[1]), Shard(dim))


def _even_dims(like: Like, mesh_shape: tuple[int, ...]) -> list[int]:
    return [d for d, size in enumerate(like.shape) if size >= max(mesh_shape)]


def _draw(like: Like, mesh_shape: tuple[int, ...], rng: random.Random) -> Placements:
    dims = _even_dims(like, mesh_shape)
    choices: list[Placement] = [Replicate(), *map(Shard, dims), *map(Shard, dims)]
    if like.dtype.is_floating_point:
        choices.append(Partial())
    return tuple(rng.choice(choices) for _ in mesh_shape)


def moves(
    sample: Sample,
    inputs: Sequence[Placements],
    merged: Merged,
    shapes: Sequence[tuple[int, ...] | None],
    mesh_shape: tuple[int, ...],
) -> str:
    """Why a call communicates by the rule's own word; empty if it says nothing of it.

    Either an input is used in another layout than it has, or a mesh dim that cuts an input cuts not
    all of the results: their values come from all of its devices.
    """
    for like, placements, used in zip(sample.likes, inputs, merged.inputs, strict=True):
        info = TensorInfo(like.shape, placements, like.dtype)
        if redistribute_cost(info, used, mesh_shape) > 0:
            return "an input is brought to another layout"
    if merged.exchanges:
        return "the rule says that shards need values of each other"
    for placements, shape in zip(merged.outputs, shapes, strict=True):
        if shape is not None and not _expressible(placements, mesh_shape, len(shape)):
            return "a result is strided as no XLA sharding is, so dispatch replicates it"
    # What is written to an argument comes to be laid out as that is.
    written = [inputs[i] for i in sample.written]
    for mesh_dim in range(len(mesh_shape)):
        cut = any(shard_dim(used[mesh_dim]) is not None for used in merged.inputs)
        results = [p for p, shape in zip(merged.outputs, shapes, strict=True) if shape is not None]
        results += written
        if cut and any(shard_dim(p[mesh_dim]) is None for p in results):
            return "a result of all shards is on every device"
    return ""


def _expressible(placements: Placements, mesh_shape: tuple[int, ...], ndim: int) -> bool:
    try:
        dim_mesh_dims(placements, mesh_shape, ndim)
    except PlacementError:
        return False
    return True
