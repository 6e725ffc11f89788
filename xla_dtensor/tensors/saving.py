"""Pickling, ``copy`` and ``torch.save``: a tensor is saved as its full value and its layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base import map_location
from xla_dtensor.tensors.backend import backend

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
    """The tensor that `reduce_tensor` took apart; its full value where ``torch.load`` is told to
    put it, if that is no xla device."""
    result: Any
    if map_location.leaves_xla():
        result = value.to(map_location.device_for("xla:0"))
        return (
            torch.nn.Parameter(result, requires_grad)
            if is_param
            else (result.requires_grad_(requires_grad))
        )
    if mesh is None or placements is None:
        result = value.to("xla")
    else:
        result = backend().distribute_tensor(value, mesh, [_decoded(*p) for p in placements])
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
