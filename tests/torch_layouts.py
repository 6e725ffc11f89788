"""What torch says about layouts, without a process group: the expected values of layout tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Index = tuple[slice, ...]


def torch_index(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Index:
    """The slice of a tensor that the device at ``coordinate`` of a mesh holds."""
    sizes, offsets = _compute_local_shape_and_global_offset(
        tuple(shape), tuple(mesh_shape), list(coordinate), list(placements)
    )
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def expected_indices(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> list[Index]:
    """Per device of the mesh, in order, the slice it holds.

    Equal to torch's, but for one case: where ``_StridedShard`` cuts unevenly, torch computes from
    the placements what its `fully_shard` doesn't do. There it is what cutting in the order of the
    placements gives.
    """
    coordinates = list(itertools.product(*map(range, mesh_shape)))
    result = [list(torch_index(shape, mesh_shape, c, placements)) for c in coordinates]
    for dim, size in enumerate(shape):
        cutters = [i for i, p in enumerate(placements) if getattr(p, "dim", None) == dim]
        if not any(isinstance(placements[i], _StridedShard) for i in cutters):
            continue
        # The order is that over a size that divides: the first to cut moves furthest.
        pieces = math.prod(mesh_shape[i] for i in cutters)
        even = [*shape[:dim], pieces, *shape[dim + 1 :]]
        step = {}
        for i in cutters:
            unit = [int(i == j) for j in range(len(mesh_shape))]
            step[i] = torch_index(even, mesh_shape, unit, placements)[dim].start
        order = sorted(cutters, key=lambda i: -step[i])
        for index, coordinate in zip(result, coordinates, strict=True):
            start, stop = 0, size
            for i in order:
                chunk = -(-(stop - start) // mesh_shape[i])
                start = min(start + coordinate[i] * chunk, stop)
                stop = min(start + chunk, stop)
            index[dim] = slice(start, stop) if start < stop else slice(size, size)
    return [tuple(index) for index in result]


def all_placements(
    mesh_shape: Sequence[int], ndim: int, *others: Placement
) -> Iterator[tuple[Placement, ...]]:
    """Every placement of a tensor of ``ndim`` dims: each mesh dim replicated, sharding a dim, or
    one of ``others``; several on one dim in each order (``_StridedShard``)."""
    choices: list[Placement] = [Replicate(), *others, *(Shard(d) for d in range(ndim))]
    for placements in itertools.product(choices, repeat=len(mesh_shape)):
        cutters = [
            [i for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
            for dim in range(ndim)
        ]
        for orders in itertools.product(*map(itertools.permutations, cutters)):
            result = list(placements)
            for dim, order in enumerate(orders):
                for position, i in enumerate(order):
                    # The pieces that mesh dims to its right made before it cuts.
                    split = math.prod(mesh_shape[j] for j in order[:position] if j > i)
                    if split > 1:
                        result[i] = _StridedShard(dim, split_factor=split)
            yield tuple(result)
