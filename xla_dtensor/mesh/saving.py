"""Pickling a mesh: as its device numbers and layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base import map_location


def reduce_mesh(mesh: Any) -> tuple[Any, ...]:
    """What ``__reduce__`` returns for an xla mesh: nothing that a process group, another process's
    hashes or a cycle between a root mesh and its flattened meshes would spoil."""
    flattened = tuple((name, flat._layout) for name, flat in mesh._flatten_mapping.items())
    arguments = mesh._rank_map.tolist(), mesh._layout, mesh.mesh_dim_names, mesh._root_mesh
    return rebuild_mesh, (*arguments, flattened)


def rebuild_mesh(
    device_numbers: list[int],
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
        known = root._flatten_mapping.get(names[0]) if names else None
        if known is not None and known._layout == layout:
            return known
    mesh = _mesh(device_numbers, layout, names, root)
    for name, flat in flattened:
        mesh._flatten_mapping[name] = _mesh(device_numbers, flat, (name,), mesh)
    return mesh


def _mesh(
    device_numbers: list[int],
    layout: Any,
    names: tuple[str, ...] | None,
    root: DeviceMesh | None,
) -> DeviceMesh:
    numbers = torch.tensor(device_numbers, dtype=torch.int, device="cpu")
    mesh = DeviceMesh(
        "xla", _layout=layout, _rank_map=numbers, mesh_dim_names=names, _root_mesh=root
    )
    mesh._rank_map = numbers  # as it was saved, which a new mesh may choose for itself
    return mesh
