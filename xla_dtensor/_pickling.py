"""Pickling, ``copy`` and ``torch.save``: a tensor is saved as its full value and its layout, a mesh
as its device numbers and layouts.

`rebuild_tensor` and `rebuild_mesh` are all that a file refers to, besides plain data; they are
registered as safe globals, so ``torch.load(weights_only=True)``, the default, works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def reduce_tensor(tensor: Any) -> tuple[Any, ...]:
    """What ``__reduce_ex__`` returns for a sharded or per-device tensor."""
    form = tensor._form
    with torch.no_grad():
        value = tensor.detach().cpu()
    return rebuild_tensor, (
        value,
        form.mesh,
        None if form.placements is None else tuple(map(_encoded, form.placements)),
        tensor.requires_grad,
        getattr(tensor, "_is_param", False),
    )


def rebuild_tensor(
    value: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[tuple[Any, ...]] | None,
    requires_grad: bool,
    is_param: bool,
) -> torch.Tensor:
    """The tensor that `reduce_tensor` took apart."""
    result: Any
    if mesh is None or placements is None:
        result = value.to("xla")
    else:
        from xla_dtensor.movement.factories import distribute_tensor

        result = distribute_tensor(value, mesh, [_decoded(*p) for p in placements])
    result.requires_grad_(requires_grad)
    if is_param:
        result._is_param = True
    return result


def _encoded(placement: Placement) -> tuple[Any, ...]:
    # Plain data: torch's placement classes may be unpickled only after torch.distributed.tensor
    # has been imported.
    from torch.distributed.tensor.placement_types import Partial, Shard, _StridedShard

    if isinstance(placement, _StridedShard):
        return "StridedShard", placement.dim, placement.split_factor
    if isinstance(placement, Shard):
        return "Shard", placement.dim
    if isinstance(placement, Partial):
        return "Partial", placement.reduce_op
    return ("Replicate",)


def _decoded(kind: str, *arguments: Any) -> Placement:
    from torch.distributed.tensor import placement_types

    if kind == "StridedShard":
        dim, split_factor = arguments
        return placement_types._StridedShard(dim, split_factor=split_factor)
    return getattr(placement_types, kind)(*arguments)


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
) -> DeviceMesh:
    """The mesh that `reduce_mesh` took apart.

    Raises:
        DeviceCountError: this machine has fewer devices.
    """
    if root is not None:
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
    return DeviceMesh(
        "xla", _layout=layout, _rank_map=numbers, mesh_dim_names=names, _root_mesh=root
    )
