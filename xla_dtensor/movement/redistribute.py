"""``redistribute`` and ``full_tensor`` for xla meshes, with torch's gradients.

No communication is written here: the value is given its new sharding, and XLA moves the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from xla_dtensor.errors import MeshMismatchError, PlacementError, UnsupportedOpError
from xla_dtensor.mesh import normalize_placements
from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.movement.local_view import as_sharded, to_local
from xla_dtensor.movement.relayout import move
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor


def redistribute(
    tensor: XLAShardedTensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> XLAShardedTensor:
    """`XLAShardedTensor.redistribute`."""
    mesh = device_mesh or tensor.device_mesh
    if placements is None:
        raise RuntimeError(
            f"redistribute() of a tensor on {tensor.device_mesh!r}: placements is needed, one per "
            "mesh dim"
        )
    if getattr(mesh, "device_type", None) != "xla":
        raise MeshMismatchError(f"redistribute: {mesh!r} is no xla mesh; use full_tensor().cpu()")
    placements = normalize_placements(placements, mesh, tensor.ndim, "redistribute")
    for i, (new, old) in enumerate(zip(placements, _on(tensor, mesh), strict=True)):
        if isinstance(new, Partial) and new != old:
            raise PlacementError(
                f"redistribute: mesh dim {i} of {mesh!r} is {old!r}; only an operation makes a "
                f"value {new!r}, redistribute can't"
            )
    return _Redistribute.apply(tensor, mesh, placements, forward_dtype, backward_dtype)


def _on(tensor: XLAShardedTensor, mesh: DeviceMesh) -> tuple[Placement, ...]:
    return tensor.placements if tensor.device_mesh == mesh else (Replicate(),) * mesh.ndim


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: XLAShardedTensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> XLAShardedTensor:
        ctx.source = tensor.device_mesh, tensor.placements, tensor.dtype
        ctx.backward_dtype = backward_dtype
        if forward_dtype is not None and forward_dtype != tensor.dtype:
            tensor = tensor.to(forward_dtype)
        return move(tensor, mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        mesh, placements, dtype = ctx.source
        wanted = unpartial(placements)
        grad = as_sharded(grad, mesh)
        communication_dtype = ctx.backward_dtype or dtype
        if grad.dtype != communication_dtype:
            grad = grad.to(communication_dtype)
        # By `apply`, not `move`: the gradient may be differentiated again.
        grad = _Redistribute.apply(grad, mesh, wanted, None, None)
        return (grad if grad.dtype == dtype else grad.to(dtype)), None, None, None, None


def full_tensor(
    tensor: XLAShardedTensor, grad_placements: Sequence[Placement] | None
) -> torch.Tensor:
    """`XLAShardedTensor.full_tensor`."""
    mesh = tensor.device_mesh
    replicated = (Replicate(),) * mesh.ndim
    if grad_placements is not None:
        grad_placements = normalize_placements(
            grad_placements, mesh, tensor.ndim, "full_tensor(grad_placements=)"
        )
        if any(not isinstance(p, Replicate | Partial) for p in grad_placements):
            raise UnsupportedOpError(
                f"full_tensor(grad_placements={list(grad_placements)}) on {mesh!r}: the gradient "
                "of a full tensor is whole on every device, so it can be Replicate or Partial"
            )
    return to_local(tensor.redistribute(placements=replicated), grad_placements)
