"""Names of mesh dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.errors import PlacementError

Alias: TypeAlias = str | tuple[str, ...] | None
"""The mesh dims that shard a tensor dim, by name: none (``"None"`` or None), one, or several, the
first one cutting first."""

NONE = "None"


def dim_name(mesh: DeviceMesh, mesh_dim: int) -> str:
    """How to call a mesh dim in a message, which may have no name."""
    return mesh.mesh_dim_names[mesh_dim] if mesh.mesh_dim_names else f"mesh dim {mesh_dim}"


def name_of(mesh: DeviceMesh, mesh_dim: int) -> str:
    """The name of a mesh dim in a `Layout`; its number if it has none."""
    return mesh.mesh_dim_names[mesh_dim] if mesh.mesh_dim_names else str(mesh_dim)


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
