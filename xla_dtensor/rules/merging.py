"""`TensorInfo`, the input of a rule per tensor, and shardings by tensor dim (`DimSharding`).

Torch writes a sharding per *mesh* dim (``placements``); rules reason per *tensor* dim
(`DimSharding`); Paddle's ``dims_mapping`` is the second with ``-1`` for "not sharded".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from xla_dtensor.base import torch_private
from xla_dtensor.base.torch_private import StridedShard

Placements = tuple[Placement, ...]
REPLICATE = Replicate()


@dataclass(frozen=True)
class TensorInfo:
    """A tensor argument as the rules see it: everything but its values.

    Attributes:
        shape: the global shape.
        placements: one per mesh dim, with non-negative tensor dims.
        dtype: torch's.

    Example::

        import torch, xla_dtensor as xd

        info = xd.rules.TensorInfo((8, 16), (xd.Shard(0),), torch.float32)
        assert info.ndim == 2 and info.nbytes == 8 * 16 * 4
    """

    shape: tuple[int, ...]
    placements: Placements
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """The number of tensor dims."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that `placement` shards, strided or not; None if it shards none."""
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


def split_factor(placement: Placement) -> int:
    """How many strided groups the shards are interleaved in: 1 for a plain `Shard`."""
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1


def make_shard(dim: int, factor: int = 1) -> Placement:
    return Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)


def norm_partial(order: float) -> Placement:
    """Pending the p-norm of the devices' p-norms."""
    return torch_private.NormPartial(order)


def reduction_name(placement: Partial) -> str:
    """The reduction that is pending: its reduce op, or "norm2" and the like."""
    order = getattr(placement, "norm_type", None)
    return str(placement.reduce_op) if order is None else f"norm{order:g}"


def pending(name: str) -> Placement:
    """The partial placement that `reduction_name` names."""
    return norm_partial(float(name[4:])) if name.startswith("norm") else Partial(name)


def moved_to(placement: Placement, dim: int) -> Placement:
    """The same kind of shard, on another tensor dim."""
    return make_shard(dim, split_factor(placement))


def map_shards(placements: Iterable[Placement], dim_map: dict[int, int | None]) -> Placements:
    """Move each shard along `dim_map`; a dim that maps to None (or nowhere) is replicated."""
    result: list[Placement] = []
    for placement in placements:
        dim = shard_dim(placement)
        if dim is None:
            result.append(placement)
        else:
            target = dim_map.get(dim)
            result.append(REPLICATE if target is None else moved_to(placement, target))
    return tuple(result)


def replicated(mesh_shape: Sequence[int]) -> Placements:
    return (REPLICATE,) * len(mesh_shape)


def is_even(info: TensorInfo, dim: int, mesh_shape: Sequence[int]) -> bool:
    """Whether the shards of tensor dim `dim` all have the same size."""
    shards = math.prod(
        n for p, n in zip(info.placements, mesh_shape, strict=True) if shard_dim(p) == dim
    )
    return info.shape[dim] % shards == 0


@dataclass(frozen=True)
class DimSharding:
    """A sharding by tensor dim.

    `dims[i]` holds the mesh dims that shard tensor dim `i`, major first; each mesh dim occurs at
    most once over `dims`, `partial` and `strided`. `partial` holds ``(mesh dim, reduction)``, and
    `strided` ``(mesh dim, tensor dim, factor)`` for a strided shard whose factor no order of mesh
    dims explains: a view makes one when it flattens a shard of an inner dim.
    """

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[tuple[int, str], ...] = ()
    strided: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        used = [m for dim in self.dims for m in dim]
        used += [m for m, _ in self.partial] + [m for m, _, _ in self.strided]
        twice = sorted({m for m in used if used.count(m) > 1})
        if twice:
            raise ValueError(f"mesh dims {twice} are used more than once in {self.dims}")

    @classmethod
    def from_placements(
        cls, placements: Sequence[Placement], ndim: int, mesh_shape: Sequence[int]
    ) -> DimSharding:
        dims: list[list[int]] = [[] for _ in range(ndim)]
        partial: list[tuple[int, str]] = []
        strided: list[tuple[int, int, int]] = []
        # A factor counts the shards made by *later* mesh dims that lie outside this one, so
        # reading from the last mesh dim leaves exactly one place to insert each mesh dim.
        for mesh_dim in reversed(range(len(placements))):
            placement = placements[mesh_dim]
            if isinstance(placement, Partial):
                partial.append((mesh_dim, reduction_name(placement)))
                continue
            dim = shard_dim(placement)
            if dim is None:
                continue
            if not 0 <= dim < ndim:
                raise ValueError(f"{placement} shards dim {dim} of a tensor with {ndim} dims")
            order, factor = dims[dim], split_factor(placement)
            for at in range(len(order) + 1):
                if math.prod(mesh_shape[m] for m in order[:at]) == factor:
                    order.insert(at, mesh_dim)
                    break
            else:
                strided.append((mesh_dim, dim, factor))
        return cls(
            tuple(tuple(d) for d in dims), tuple(reversed(partial)), tuple(reversed(strided))
        )

    def placements(self, mesh_shape: Sequence[int]) -> Placements:
        result: list[Placement] = [REPLICATE] * len(mesh_shape)
        for dim, order in enumerate(self.dims):
            for at, mesh_dim in enumerate(order):
                outer = [m for m in order[:at] if m > mesh_dim]
                result[mesh_dim] = make_shard(dim, math.prod(mesh_shape[m] for m in outer))
        for mesh_dim, dim, factor in self.strided:
            result[mesh_dim] = make_shard(dim, factor)
        for mesh_dim, reduce_op in self.partial:
            result[mesh_dim] = pending(reduce_op)
        return tuple(result)

    @property
    def dims_mapping(self) -> list[int | list[int]]:
        """Per tensor dim: -1, its mesh dim, or the list of its mesh dims."""
        entries = [list(order) for order in self.dims]
        for mesh_dim, dim, _ in self.strided:
            entries[dim].append(mesh_dim)
        return [-1 if not e else e[0] if len(e) == 1 else e for e in entries]

    @classmethod
    def from_dims_mapping(
        cls,
        mapping: Sequence[int | Sequence[int]],
        partial: Sequence[tuple[int, str]] = (),
    ) -> DimSharding:
        dims = [
            (() if entry == -1 else (entry,)) if isinstance(entry, int) else tuple(entry)
            for entry in mapping
        ]
        return cls(tuple(dims), tuple(partial))
