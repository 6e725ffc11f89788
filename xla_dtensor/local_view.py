"""Between the two views: ``DTensor.from_local`` and ``to_local`` for xla meshes.

A per-device tensor of this package has the same value on every device so far, so what needs
different values per device raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.mesh import normalize_placements
from xla_dtensor.sharded_tensor import XLAShardedTensor


def from_local(
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    *,
    run_check: bool = False,
    shape: Any = None,
    stride: Any = None,
    grad_placements: Sequence[Placement] | None = None,
) -> XLAShardedTensor:
    """A sharded tensor from what each device holds.

    Raises:
        UnsupportedOpError: placements other than ``Replicate`` (the devices' values would differ).
    """
    if isinstance(local_tensor, DTensor):
        raise RuntimeError(
            "the local_tensor argument only accepts torch.Tensor but got "
            f"{type(local_tensor)} value."
        )
    placements = normalize_placements(placements, device_mesh, local_tensor.ndim, "from_local")
    if any(not isinstance(p, Replicate) for p in placements) or grad_placements is not None:
        raise UnsupportedOpError(
            f"from_local(placements={list(placements)}, grad_placements={grad_placements}) on "
            f"{device_mesh!r}: a local tensor has the same value on every device, so only "
            "Replicate is possible; use distribute_tensor(full_value, mesh, placements)"
        )
    return _FromDevices.apply(local_tensor, device_mesh)


class _FromDevices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> XLAShardedTensor:
        from xla_dtensor.factories import distribute_tensor

        ctx.device = tensor.device
        return distribute_tensor(tensor.detach(), mesh, None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        return full if ctx.device.type == "xla" else full.cpu(), None


def to_local(tensor: XLAShardedTensor, grad_placements: Sequence[Placement] | None) -> torch.Tensor:
    """`XLAShardedTensor.to_local`.

    Raises:
        UnsupportedOpError: the devices hold different values.
    """
    if any(not isinstance(p, Replicate) for p in tensor.placements):
        raise UnsupportedOpError(
            f"to_local() of a tensor with placements {list(tensor.placements)} on "
            f"{tensor.device_mesh!r}: the devices hold different values, which one process can't "
            "show as one tensor; use full_tensor(), local_shards, or redistribute to Replicate"
        )
    return tensor.full_tensor(grad_placements=grad_placements)
