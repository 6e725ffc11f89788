"""Pickling and ``torch.save``: a tensor is saved as its full value and its layout."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement


def reduce_tensor(tensor: Any) -> tuple[Any, ...]:
    """What ``__reduce_ex__`` returns for a sharded or per-device tensor."""
    form = tensor._form
    with torch.no_grad():
        value = tensor.detach().cpu()
    return rebuild_tensor, (
        value,
        form.mesh,
        form.placements,
        tensor.requires_grad,
        getattr(tensor, "_is_param", False),
    )


def rebuild_tensor(
    value: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: tuple[Placement, ...] | None,
    requires_grad: bool,
    is_param: bool,
) -> torch.Tensor:
    """The tensor that `reduce_tensor` took apart."""
    if mesh is None:
        result = value.to("xla")
    else:
        from xla_dtensor.factories import distribute_tensor

        result = distribute_tensor(value, mesh, placements)
    result.requires_grad_(requires_grad)
    if is_param:
        result._is_param = True
    return result
