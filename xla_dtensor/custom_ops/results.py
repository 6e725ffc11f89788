"""Turns a `DFunction`'s results into sharded tensors, laid out as its rule says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch.distributed.tensor import Replicate

from xla_dtensor.base import executor
from xla_dtensor.custom_ops.distributed_op import DistributedOp, Inferred
from xla_dtensor.custom_ops.gradients import Pass, Result
from xla_dtensor.errors import LayoutRuleError
from xla_dtensor.forms.read import read
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh import mesh_dim_axes
from xla_dtensor.mesh.dim_names import name_of
from xla_dtensor.mesh.layout import Layout
from xla_dtensor.movement.local_view import as_sharded, from_local
from xla_dtensor.movement.relayout import move
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor


def results(op: DistributedOp, out: Any, inferred: Inferred, state: Pass, view: str) -> Any:
    """``out`` with its tensors sharded; what is no tensor stays as it is.

    Raises:
        LayoutRuleError: they aren't what the rule speaks of.
    """
    items = list(out) if isinstance(out, tuple | list) else [out]
    tensors = [x for x in items if isinstance(x, torch.Tensor)]
    if len(tensors) != len(inferred.outputs):
        raise LayoutRuleError(
            f"{op._describes_rule} gave {len(inferred.outputs)} layouts {list(inferred.outputs)}, "
            f"but forward returned {len(tensors)} tensors, of shapes {shapes_of(tensors)}"
        )
    wrap = _lay_out if view == "global" else _from_devices
    shapes: Sequence[Any] = inferred.shapes or (None,) * len(tensors)
    wrapped = iter(
        [
            wrap(op, index, tensor, layout, shape, state)
            for index, (tensor, layout, shape) in enumerate(
                zip(tensors, inferred.outputs, shapes, strict=True)
            )
        ]
    )
    made = [next(wrapped) if isinstance(x, torch.Tensor) else x for x in items]
    return type(out)(made) if isinstance(out, tuple | list) else made[0]


def shapes_of(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """For messages."""
    return [list(x.shape) for x in tensors]


def _check_rank(op: DistributedOp, index: int, tensor: torch.Tensor, layout: Layout) -> None:
    if layout.ndim is not None and layout.ndim != tensor.ndim:
        raise LayoutRuleError(
            f"{op._describes_rule} gave {layout!r}, a layout of a tensor of {layout.ndim} dims, "
            f"for result {index} of shape {list(tensor.shape)}"
        )


def _from_devices(
    op: DistributedOp,
    index: int,
    local: torch.Tensor,
    layout: Layout,
    shape: tuple[int, ...] | None,
    state: Pass,
) -> XLAShardedTensor:
    if isinstance(local, XLAShardedTensor):
        raise LayoutRuleError(
            f"{op.op_name!r}: forward returned a sharded tensor of shape {list(local.shape)}, "
            f"{local.layout!r}, as result {index}; it works on per-device tensors and the rule "
            f'({layout!r}) makes the result a sharded one. Set view = "global" on the DFunction to '
            "write forward in sharded tensors"
        )
    if not isinstance(local, XLATensor):
        local = local.to("xla")
    assert isinstance(local, XLATensor)
    _check_rank(op, index, local, layout)
    if shape is not None and layout.local_shape(shape) != tuple(local.shape):
        raise LayoutRuleError(
            f"{op._describes_rule} makes result {index} a tensor of shape {list(shape)} laid out "
            f"as {layout!r}, of which each device holds {list(layout.local_shape(shape))}; forward "
            f"returned {list(local.shape)} per device"
        )
    dims = zip(layout.placements, mesh_dim_axes(layout.mesh), strict=True)
    for mesh_dim, (placement, axes) in enumerate(dims):
        if isinstance(placement, Replicate) and set(axes) & set(local.varying):
            raise LayoutRuleError(
                f"{op._describes_rule} gave {layout!r} for result {index}, replicated over mesh "
                f"dim {name_of(layout.mesh, mesh_dim)!r}, but "
                f"forward's result of shape {list(local.shape)} differs from device to device "
                f"there (it was computed from what does). Is it a part of a sum "
                "(layout.with_partial), or does forward lack a collective?"
            )
    if local.requires_grad:
        local = Result.apply(local, layout, state)
    result = from_local(local, layout.mesh, layout.placements)
    if executor.trace() is None or result.is_meta:
        return result
    return _Constrained.apply(result)


def _lay_out(
    op: DistributedOp,
    index: int,
    tensor: torch.Tensor,
    layout: Layout,
    shape: tuple[int, ...] | None,
    state: Pass,
) -> XLAShardedTensor:
    _check_rank(op, index, tensor, layout)
    if shape is not None and shape != tuple(tensor.shape):
        raise LayoutRuleError(
            f"{op._describes_rule} makes result {index} a tensor of shape {list(shape)}; forward "
            f"returned {list(tensor.shape)}"
        )
    if not isinstance(tensor, XLAShardedTensor):
        tensor = as_sharded(tensor, layout.mesh)
    if tensor.layout.placements == layout.placements and executor.trace() is None:
        return tensor
    return _LaidOut.apply(tensor, layout)


class _Constrained(torch.autograd.Function):
    """The tensor with its sharding asked of XLA, in a trace."""

    @staticmethod
    def forward(ctx: Any, tensor: XLAShardedTensor) -> XLAShardedTensor:
        form = tensor._form
        array = jax.lax.with_sharding_constraint(read(tensor), form.sharding)
        return XLAShardedTensor(Storage(array, form), form)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class _LaidOut(torch.autograd.Function):
    """The tensor in another layout, ``Partial`` included: of the global view that is a label."""

    @staticmethod
    def forward(ctx: Any, tensor: XLAShardedTensor, layout: Layout) -> XLAShardedTensor:
        return move(tensor, layout.mesh, layout.placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None
