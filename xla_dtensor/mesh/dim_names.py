"""Names of mesh dims, in messages and in a `Layout`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement

from xla_dtensor.errors import MeshDimError, PlacementError

Alias: TypeAlias = str | tuple[str, ...] | None
"""The mesh dims that shard a tensor dim, by name: none (``"None"`` or None), one, or several, the
first one cutting first."""

NONE = "None"


def dim_name(mesh: DeviceMesh, mesh_dim: int) -> str:
    """The name of a mesh dim in messages, also of one that has none."""
    return mesh.mesh_dim_names[mesh_dim] if mesh.mesh_dim_names else f"mesh dim {mesh_dim}"


def name_of(mesh: DeviceMesh, mesh_dim: int) -> str:
    """The name of a mesh dim in a `Layout`; its number if it has none."""
    return mesh.mesh_dim_names[mesh_dim] if mesh.mesh_dim_names else str(mesh_dim)


def mesh_dim_of(mesh: DeviceMesh, name: str | int) -> int:
    """The number of the mesh dim that a `Layout` calls so.

    Raises:
        MeshDimError: there is none.
    """
    names = mesh.mesh_dim_names or ()
    if isinstance(name, int) and -mesh.ndim <= name < mesh.ndim:
        return name % mesh.ndim
    if name not in names:
        raise MeshDimError(
            f"Layout: {mesh!r} has no mesh dim {name!r}; its dims are {names or 'unnamed'}"
        )
    return names.index(name)


def alias_of(mesh: DeviceMesh, order: Sequence[int]) -> str | tuple[str, ...]:
    """The mesh dims that shard a tensor dim, by name: the inverse of `names_of`."""
    names = tuple(name_of(mesh, m) for m in order)
    return NONE if not names else names[0] if len(names) == 1 else names


def names_of(entry: Alias) -> tuple[str, ...]:
    """The mesh dims of one entry."""
    if entry is None or entry == NONE:
        return ()
    return (entry,) if isinstance(entry, str | int) else tuple(entry)


def has_placements(dims: Sequence[Any]) -> bool:
    """Whether a layout is given as placements, not as names.

    Raises:
        PlacementError: it is a mixture.
    """
    kinds = {isinstance(d, Placement) for d in dims}
    if kinds == {True, False}:
        raise PlacementError(
            f"Layout: {tuple(dims)} mixes placements (one per mesh dim) and alias names (one per "
            "tensor dim)"
        )
    return kinds == {True}


def layout_text(
    mesh: DeviceMesh, placements: Sequence[Placement] | None, dims: Sequence[Alias] | None
) -> str:
    """How a `Layout` is printed.

    Args:
        placements: None if it is empty.
        dims: per tensor dim the mesh dims that shard it; None if only placements are known.
    """
    sizes = ", ".join(f"{name_of(mesh, m)}={size}" for m, size in enumerate(mesh.shape))
    if placements is None:
        return f"Layout({sizes})"
    if dims is None:
        return f"Layout({sizes}; {', '.join(map(str, placements))})"
    tensor = ", ".join(n if isinstance(n, str) else f"({', '.join(n or ())})" for n in dims)
    pending = "".join(
        f"; {p.reduce_op} over {name_of(mesh, m)}"
        for m, p in enumerate(placements)
        if isinstance(p, Partial)
    )
    return f"Layout({sizes}; [{tensor}]{pending})"
