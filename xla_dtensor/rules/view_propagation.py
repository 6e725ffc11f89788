"""Shardings through dim transforms.

Mesh dims are read in order, each cutting what the earlier ones left of its tensor dim. A shard
goes on wherever every device's piece stays one piece of the output:

- unchanged through `InputDim`;
- through `Flatten`: the leading dim's shard is a shard of the whole; an inner dim's is strided,
  one group per index of the dims before it;
- through `Split`: it falls on the leading factor that is not yet cut to one.

Anything else, and every uneven shard that would be split or flattened, is replicated first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.tensor import Placement

from xla_dtensor.rules.dim_transforms import (
    Flatten,
    InputDim,
    Repeat,
    Shape,
    Split,
    Transforms,
)
from xla_dtensor.rules.merging import REPLICATE, Placements, make_shard, shard_dim, split_factor


def propagate(
    transforms: Transforms,
    placements: Placements,
    in_shape: Shape,
    mesh_shape: Sequence[int],
    *,
    strided: bool = True,
) -> tuple[Placements, Placements]:
    """The placements to use the input in, and the output's.

    Without `strided`, a shard that would come out strided is replicated instead.
    """
    walk = _Walk(transforms, in_shape, strided)
    inputs: list[Placement] = []
    outputs: list[Placement] = []
    for placement, n in zip(placements, mesh_shape, strict=True):
        dim = shard_dim(placement)
        if dim is None:
            inputs.append(placement)
            outputs.append(placement)
            continue
        out = walk.step(dim, split_factor(placement), n)
        inputs.append(REPLICATE if out is None else placement)
        outputs.append(REPLICATE if out is None else out)
    return tuple(inputs), tuple(outputs)


class _Walk:
    """The state of one propagation: what is left of each dim after the mesh dims read so far."""

    def __init__(self, transforms: Transforms, in_shape: Shape, strided: bool) -> None:
        self.transforms = transforms
        self.in_left = list(in_shape)
        self.strided = strided
        # What is left of each factor of a split output run, by the run's output dims.
        self.factors: dict[int, int] = {
            out: t.sizes[t.index] for out, t in enumerate(transforms) if isinstance(t, Split)
        }
        self.targets: dict[int, list[int]] = {}
        for out, transform in enumerate(transforms):
            for dim in _sources(transform):
                self.targets.setdefault(dim, []).append(out)

    def step(self, dim: int, factor: int, n: int) -> Placement | None:
        """Where the shard of `dim` over a mesh dim of size `n` goes; None if it cannot."""
        targets = self.targets.get(dim)
        if targets is None:
            return None
        transform = self.transforms[targets[0]]
        placement: Placement | None
        if isinstance(transform, InputDim):
            placement = make_shard(targets[0], factor)
        elif isinstance(transform, Repeat) or self.in_left[dim] % n:
            return None
        elif isinstance(transform, Flatten):
            placement = self._flattened(transform, targets[0], dim, factor)
        else:
            placement = self._split(targets, dim, factor, n)
        if placement is not None:
            self.in_left[dim] //= n
        return placement

    def _flattened(self, transform: Flatten, out: int, dim: int, factor: int) -> Placement | None:
        outer = [d.dim for d in transform.dims[: transform.dims.index(InputDim(dim))]]
        factor *= math.prod(self.in_left[d] for d in outer)
        return make_shard(out, factor) if factor == 1 or self.strided else None

    def _split(self, targets: list[int], dim: int, factor: int, n: int) -> Placement | None:
        """The factor before which exactly `factor` groups remain takes the shard."""
        first = self.transforms[targets[0]]
        assert isinstance(first, Split)
        if isinstance(first.source, Flatten) and first.source.dims[0] != InputDim(dim):
            return None
        groups = 1
        for out in targets:
            size = self.factors[out]
            if groups == factor and size > 1:
                if size % n:
                    return None
                self.factors[out] //= n
                return make_shard(out)
            if groups * size > factor:
                # The groups end inside this factor: strided there, if they divide it evenly.
                inside = factor // groups
                if not self.strided or groups * inside != factor or size % (inside * n):
                    return None
                self.factors[out] //= n
                return make_shard(out, inside)
            groups *= size
        return None


def _sources(transform: object) -> list[int]:
    match transform:
        case InputDim(d) | Repeat(InputDim(d), _) | Split(InputDim(d), _, _):
            return [d]
        case Flatten(dims) | Split(Flatten(dims), _, _):
            return [d.dim for d in dims]
    return []
