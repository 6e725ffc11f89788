"""torch placements and the mesh axes of each tensor dim, both ways, and the checks on placements.

A tensor dim may be sharded over several mesh dims. The order in which they cut it matters: with
``Shard(0)`` on mesh dims 0 and 1 the first cuts first (is major). torch writes the other order as
``_StridedShard(0, split_factor=n)`` on the mesh dim that cuts later, n being the number of pieces
that mesh dims to its right have cut before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from xla_dtensor.base.torch_private import StridedShard
from xla_dtensor.errors import PlacementError
from xla_dtensor.mesh.dim_names import name_of
from xla_dtensor.mesh.frame import frame_of, mesh_dim_axes

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


def normalize_placements(
    placements: Sequence[Placement] | None, mesh: DeviceMesh, ndim: int, call: str
) -> tuple[Placement, ...]:
    """``placements`` checked, with negative dims resolved; all ``Replicate`` for None.

    Args:
        ndim: number of tensor dims.
        call: the user's call, for the message.

    Raises:
        PlacementError: there are not as many as mesh dims, a shard dim is out of range, a strided
            shard's split factor fits no mesh dims to its right, or ``Partial`` reductions differ.
    """
    if placements is None:
        return (Replicate(),) * mesh.ndim
    placements = tuple(placements)
    if len(placements) != mesh.ndim:
        raise PlacementError(
            f"{call}: got {len(placements)} placements {list(placements)} for {mesh!r}, which has "
            f"{mesh.ndim} dims; give one placement per mesh dim"
        )
    normalized = tuple(_normalized(p, mesh, ndim, call) for p in placements)
    reductions = {p.reduce_op for p in normalized if isinstance(p, Partial)}
    if len(reductions) > 1:
        raise PlacementError(
            f"{call}: mixed Partial reductions {sorted(reductions)} in {list(placements)} on "
            f"{mesh!r} have no defined order; reduce one of them first (redistribute it to "
            "Replicate)"
        )
    dim_mesh_dims(normalized, tuple(mesh.shape), ndim, call)
    return normalized


def _normalized(placement: Placement, mesh: DeviceMesh, ndim: int, call: str) -> Placement:
    if isinstance(placement, Replicate):
        return placement
    if isinstance(placement, Partial):
        if placement.reduce_op not in REDUCE_OPS:
            raise PlacementError(
                f"{call}: Partial({placement.reduce_op!r}) on {mesh!r}: the reductions are "
                f"{', '.join(REDUCE_OPS)}"
            )
        return placement
    dim = getattr(placement, "dim", None)
    if not isinstance(placement, Shard | StridedShard) or dim is None:
        raise PlacementError(
            f"{call}: {placement!r} is not a placement; use Replicate(), Shard(dim) or Partial()"
        )
    if not -ndim <= dim < ndim:
        raise PlacementError(
            f"{call}: {placement!r} on {mesh!r}: the tensor has {ndim} dims, so a shard dim is "
            + (f"from {-ndim} to {ndim - 1}" if ndim else "impossible; use Replicate()")
        )
    if isinstance(placement, StridedShard):
        return StridedShard(dim % ndim, split_factor=placement.split_factor)
    return Shard(dim % ndim)


def dim_mesh_dims(
    placements: Sequence[Placement],
    mesh_shape: tuple[int, ...],
    ndim: int,
    call: str = "placements",
) -> tuple[tuple[int, ...], ...]:
    """Per tensor dim the mesh dims that shard it, major to minor.

    Raises:
        PlacementError: a ``_StridedShard``'s split factor is not a product of the sizes of mesh
            dims to its right that shard the same tensor dim.
    """
    orders: list[list[int]] = [[] for _ in range(ndim)]
    # From the right: a split factor counts the pieces that mesh dims further right have cut, so
    # these have to be in the order already.
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if isinstance(placement, StridedShard):
            order = orders[placement.dim]
            for position in range(len(order) + 1):
                if math.prod(mesh_shape[d] for d in order[:position]) == placement.split_factor:
                    order.insert(position, mesh_dim)
                    break
            else:
                raise PlacementError(
                    f"{call}: {placement!r} on mesh dim {mesh_dim} of a mesh of shape {mesh_shape}:"
                    f" no mesh dims to its right cut tensor dim {placement.dim} into "
                    f"{placement.split_factor} pieces"
                )
        elif isinstance(placement, Shard):
            orders[placement.dim].insert(0, mesh_dim)
    return tuple(map(tuple, orders))


def placements_of(
    mesh_dims_per_dim: Sequence[Sequence[int]],
    mesh_shape: tuple[int, ...],
    partial: dict[int, str] | None = None,
) -> tuple[Placement, ...]:
    """The inverse of `dim_mesh_dims`, with ``Partial(partial[i])`` on mesh dims i."""
    placements: list[Placement] = [Replicate()] * len(mesh_shape)
    for mesh_dim, reduce_op in (partial or {}).items():
        placements[mesh_dim] = Partial(reduce_op)
    for dim, order in enumerate(mesh_dims_per_dim):
        for position, mesh_dim in enumerate(order):
            split = math.prod(mesh_shape[d] for d in order[:position] if d > mesh_dim)
            placements[mesh_dim] = (
                Shard(dim) if split == 1 else StridedShard(dim, split_factor=split)
            )
    return tuple(placements)


def of_dims(orders: Sequence[Sequence[int]], mesh: DeviceMesh, what: str) -> tuple[Placement, ...]:
    """`placements_of` per tensor dim the mesh dims that shard it, in a `Layout` made of ``what``.

    Raises:
        PlacementError: a mesh dim doesn't exist or is used twice.
    """
    used: dict[int, int] = {}
    for dim, order in enumerate(orders):
        for mesh_dim in order:
            if not 0 <= mesh_dim < mesh.ndim:
                raise PlacementError(
                    f"Layout: {what}: {mesh!r} has no mesh dim {mesh_dim}; -1 is for a tensor "
                    "dim that isn't sharded"
                )
            if mesh_dim in used:
                raise PlacementError(
                    f"Layout: {what} uses mesh dim {name_of(mesh, mesh_dim)!r} of {mesh!r} for "
                    f"tensor dim {used[mesh_dim]} and again for tensor dim {dim}; a mesh dim "
                    "shards one tensor dim"
                )
            used[mesh_dim] = dim
    return placements_of(orders, tuple(mesh.shape))


def pieces_of(
    placements: Sequence[Placement],
    mesh_shape: tuple[int, ...],
    shape: Sequence[int],
    ndim: int | None,
    call: str,
) -> list[int]:
    """Per dim of ``shape`` the number of pieces.

    Args:
        ndim: the number of dims that ``placements`` are of, if known.
        call: the user's call, for the message.

    Raises:
        PlacementError: ``shape`` has other dims.
    """
    if ndim is not None and len(shape) != ndim:
        raise PlacementError(f"{call}: the layout is of a tensor of {ndim} dims")
    try:
        orders = dim_mesh_dims(placements, mesh_shape, len(shape))
    except IndexError:
        raise PlacementError(f"{call}: it shards a dim that the tensor doesn't have") from None
    return [math.prod(mesh_shape[m] for m in order) for order in orders]


def dim_axes(
    placements: Sequence[Placement], mesh: DeviceMesh, ndim: int
) -> tuple[tuple[str, ...], ...]:
    """Per tensor dim the frame axes that shard it, major to minor."""
    axes = mesh_dim_axes(mesh)
    orders = dim_mesh_dims(placements, tuple(mesh.shape), ndim)
    return tuple(tuple(name for d in order for name in axes[d]) for order in orders)


def to_partition_spec(
    placements: Sequence[Placement], mesh: DeviceMesh, ndim: int
) -> PartitionSpec:
    """The ``PartitionSpec`` over the root's frame for a tensor of ``ndim`` dims.

    ``Replicate`` and ``Partial`` mesh dims don't appear in it.

    Raises:
        PlacementError: as `normalize_placements`.
    """
    from jax.sharding import PartitionSpec

    placements = normalize_placements(placements, mesh, ndim, "to_partition_spec")
    return PartitionSpec(*(_entry(names) for names in dim_axes(placements, mesh, ndim)))


def _entry(names: tuple[str, ...]) -> Any:
    return None if not names else names[0] if len(names) == 1 else names


def from_partition_spec(
    spec: PartitionSpec, mesh: DeviceMesh, ndim: int | None = None
) -> tuple[Placement, ...]:
    """The placements on ``mesh`` that ``spec`` over its root's frame means.

    Raises:
        PlacementError: ``spec`` names an axis that the frame or the mesh doesn't have, cuts a mesh
            dim apart, or uses an axis twice.
    """
    entries = tuple(spec)
    if ndim is not None and len(entries) > ndim:
        raise PlacementError(f"from_partition_spec: {spec} has more entries than {ndim} dims")
    axes_of = mesh_dim_axes(mesh)
    frame = frame_of(mesh)
    seen: set[str] = set()
    orders: list[list[int]] = []
    for entry in entries:
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        order: list[int] = []
        position = 0
        while position < len(names):
            mesh_dim = next(
                (
                    i
                    for i, group in enumerate(axes_of)
                    if group and names[position : position + len(group)] == group
                ),
                None,
            )
            if mesh_dim is None:
                raise PlacementError(
                    f"from_partition_spec: {names[position]!r} in {spec} is no whole dim of "
                    f"{mesh!r} (axes {tuple(frame.sizes)})"
                )
            group = axes_of[mesh_dim]
            if seen & set(group):
                raise PlacementError(f"from_partition_spec: {spec} uses {group} twice")
            seen.update(group)
            order.append(mesh_dim)
            position += len(group)
        orders.append(order)
    return placements_of(orders, tuple(mesh.shape))


def shard_after(
    dim: int, mesh: DeviceMesh, placements: tuple[Placement, ...], start: int
) -> Placement:
    """The placement that shards ``dim`` after the mesh dims from ``start`` on have."""
    pieces = 1
    for i in range(start, mesh.ndim):
        placement = placements[i]
        if isinstance(placement, Shard | StridedShard) and placement.dim == dim:
            pieces *= mesh.size(i)
    return Shard(dim) if pieces == 1 else StridedShard(dim, split_factor=pieces)


def unpartial(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """``placements`` with the pending reductions done."""
    return tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
