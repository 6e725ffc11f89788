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


def reduce_tensor(tensor: Any, own: frozenset[str]) -> tuple[Any, ...]:
    """What ``__reduce_ex__`` returns for a sharded or per-device tensor.

    Args:
        own: the names of attributes that aren't the user's.
    """
    form = tensor._form
    attributes = {k: v for k, v in vars(tensor).items() if k not in own and k != "_is_param"}
    with torch.no_grad():
        value = tensor.detach().cpu()
    return rebuild_tensor, (
        value,
        form.mesh,
        None if form.placements is None else tuple(map(_encoded, form.placements)),
        tensor.requires_grad,
        getattr(tensor, "_is_param", False),
        *((attributes,) if attributes else ()),
    )


def rebuild_tensor(
    value: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[tuple[Any, ...]] | None,
    requires_grad: bool,
    is_param: bool,
    attributes: dict[str, Any] | None = None,
) -> torch.Tensor:
    """The tensor that `reduce_tensor` took apart; its full value where ``torch.load`` is told to
    put it, if that is no xla device."""
    result: Any
    if map_location.leaves_xla():
        result = value.to(map_location.device_for("xla:0"))
        if is_param:
            result = torch.nn.Parameter(result, requires_grad)
    elif mesh is None or placements is None:
        result = value.to("xla")
    else:
        result = backend().distribute_tensor(value, mesh, [_decoded(*p) for p in placements])
    result.requires_grad_(requires_grad)
    if is_param and not isinstance(result, torch.nn.Parameter):
        result._is_param = True
    for name, attribute in (attributes or {}).items():
        setattr(result, name, attribute)
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
