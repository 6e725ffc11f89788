"""Pickling a mesh: as its device numbers and layouts."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base import map_location
from xla_dtensor.base.torch_private.attributes import (
    cut_from,
    device_numbers,
    flattened_meshes,
    layout_of_mesh,
    mesh_of,
)


def reduce_mesh(mesh: Any) -> tuple[Any, ...]:
    """What ``__reduce__`` returns for an xla mesh: nothing that a process group, another process's
    hashes or a cycle between a root mesh and its flattened meshes would spoil."""
    flattened = flattened_meshes(mesh).items()
    layouts = tuple((name, layout_of_mesh(flat)) for name, flat in flattened)
    numbers = device_numbers(mesh).tolist()
    arguments = numbers, layout_of_mesh(mesh), mesh.mesh_dim_names, cut_from(mesh)
    return rebuild_mesh, (*arguments, layouts)


def rebuild_mesh(
    numbers: list[int],
    layout: Any,
    names: tuple[str, ...] | None,
    root: DeviceMesh | None,
    flattened: tuple[tuple[str, Any], ...],
) -> DeviceMesh | None:
    """The mesh that `reduce_mesh` took apart; None if ``torch.load`` is told to put what is on it
    elsewhere: the machine may have no such devices.

    Raises:
        DeviceCountError: this machine has fewer devices.
    """
    if map_location.leaves_xla():
        return None
    if root is not None:
        # Unpickling the root has made its flattened meshes already; this one is to be that very
        # object, as it was when it was saved.
        known = flattened_meshes(root).get(names[0]) if names else None
        if known is not None and layout_of_mesh(known) == layout:
            return known
    mesh = mesh_of(layout, numbers, names, root)
    for name, flat in flattened:
        flattened_meshes(mesh)[name] = mesh_of(flat, numbers, (name,), mesh)
    return mesh
