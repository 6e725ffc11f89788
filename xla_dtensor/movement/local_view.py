"""``DTensor.from_local`` and ``to_local`` for xla meshes, with torch's gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from xla_dtensor.base import events, executor
from xla_dtensor.errors import PlacementError, UnsupportedOpError
from xla_dtensor.forms.form import device_form, sharded_form
from xla_dtensor.forms.local_form import from_devices, global_meta, local_form, unreduced_dims
from xla_dtensor.forms.storage import Storage
from xla_dtensor.forms.views import CrossingStep
from xla_dtensor.mesh import frame_of, mesh_dim_axes, normalize_placements
from xla_dtensor.mesh.dim_names import dim_name
from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.movement import source_rank
from xla_dtensor.movement.own_shard import (
    are_equal_along,
    has_own_piece,
    of_own_pieces,
    own_piece,
)
from xla_dtensor.movement.relayout import relayout
from xla_dtensor.runtime import arrays
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.sharded_tensor import DTENSORS, XLAShardedTensor

Placements = tuple[Placement, ...]


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
    """A sharded tensor from what each device holds; differentiable.

    Args:
        local_tensor: a per-device tensor, or a CPU tensor (then every device holds it; of several
            processes, each one's devices its own).
        placements: how the local tensors make up the sharded one; replicated by default.
        run_check: along mesh dims that replicate, take the value of coordinate 0 for all, as torch
            does by a broadcast. Without it such a mesh dim refuses a tensor that varies along it,
            and one that several processes have each of their own has to be the same in all.
        shape, stride: of the sharded tensor; both or none.
        grad_placements: those of the gradient that flows back, by default ``placements`` with
            ``Replicate`` for ``Partial``.

    Raises:
        UnsupportedOpError: the tensor differs between devices that are to hold the same.
        DivergenceError: processes whose devices are to hold the same have different ones.
        PlacementError: ``shape`` isn't what the local tensors make up.
    """
    if isinstance(local_tensor, DTENSORS):
        raise RuntimeError(
            "the local_tensor argument only accepts torch.Tensor but got "
            f"{type(local_tensor)} value."
        )
    ndim = local_tensor.ndim
    placements = normalize_placements(placements, device_mesh, ndim, "from_local")
    if (shape is None) != (stride is None):
        raise RuntimeError(
            f"Found shape:{shape}, stride:{stride}. Please pass both shape and stride at the same "
            "time."
        )
    if grad_placements is not None:
        grad_placements = normalize_placements(
            grad_placements, device_mesh, ndim, "from_local(grad_placements=)"
        )
    if local_tensor.device.type == "cpu":
        local_tensor = local_tensor.to("xla")
    meta = None if shape is None else (tuple(shape), tuple(stride))
    return _FromLocal.apply(local_tensor, device_mesh, placements, run_check, meta, grad_placements)


def as_sharded(tensor: torch.Tensor, mesh: DeviceMesh) -> XLAShardedTensor:
    """``tensor`` itself if it is sharded, else as replicated on ``mesh``."""
    if isinstance(tensor, XLAShardedTensor):
        return tensor
    return from_local(tensor, mesh)  # differentiable: gradients of gradients pass here


def _for_gradient(placements: Placements) -> Placements:
    """The gradient of a part of a sum is the gradient of the sum: torch's rule."""
    return unpartial(placements)


def _tell_trace(tensor: Any) -> None:
    """No operation reads a tensor when it is seen in the other view, but a leaf gets its gradient
    through that, and a step that is traced looks after the leaves that it has met."""
    executor.current().touched(tensor)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: XLATensor,
        mesh: DeviceMesh,
        placements: Placements,
        run_check: bool,
        meta: tuple[tuple[int, ...], tuple[int, ...]] | None,
        grad_placements: Placements | None,
    ) -> XLAShardedTensor:
        _tell_trace(local)
        ctx.grad_layout = mesh, grad_placements or _for_gradient(placements)
        ctx.set_materialize_grads(False)
        return _shard(local, mesh, placements, run_check, meta)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return (None,) * 6
        mesh, placements = ctx.grad_layout
        grad = as_sharded(grad, mesh).redistribute(placements=placements)
        view = _OwnPiece if has_own_piece(grad._form) else _ToLocal
        return view.apply(grad, None), None, None, None, None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: XLAShardedTensor, grad_placements: Placements | None
    ) -> XLATensor:
        ctx.layout = tensor.device_mesh, grad_placements or _for_gradient(tensor.placements)
        ctx.given = grad_placements is not None
        ctx.meta = tuple(tensor.shape), tuple(tensor.stride())
        ctx.set_materialize_grads(False)
        _tell_trace(tensor)
        form = tensor._form.on_current_frame()
        target = local_form(form)
        observer = events.observer
        if observer is not None:
            observer.to_local(form, target)
        tensor._storage_.introduce(tensor)
        local = XLATensor(tensor._storage_, target, (*tensor._steps, CrossingStep(form, target)))
        tensor._storage_.share_writes(tensor, local)
        return local

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return None, None
        mesh, placements = ctx.layout
        varying = grad._form.varying if isinstance(grad, XLATensor) else ()
        for i in _replicated_but_varying(varying, mesh, placements):
            if are_equal_along(grad, mesh, i):
                continue
            raise UnsupportedOpError(
                f"the gradient of to_local() or full_tensor() differs from device to device along "
                f"{dim_name(mesh, i)!r}, where the sharded tensor on {mesh!r} is replicated: "
                "each device has contributed its own part. Say how they make up one gradient: "
                "grad_placements=[...] with Partial() there sums them"
            )
        # Uneven dims have no local view, so each device's gradient has the tensor's own shape here.
        return _FromLocal.apply(grad, mesh, placements, False, ctx.meta, None), None


class _OwnPiece(torch.autograd.Function):
    """`_ToLocal` where only the process itself knows the shape of what it holds."""

    @staticmethod
    def forward(
        ctx: Any, tensor: XLAShardedTensor, grad_placements: Placements | None
    ) -> XLATensor:
        ctx.layout = tensor.device_mesh, grad_placements or _for_gradient(tensor.placements)
        ctx.meta = tuple(tensor.shape), tuple(tensor.stride())
        ctx.set_materialize_grads(False)
        return own_piece(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None
        mesh, placements = ctx.layout
        return _FromLocal.apply(grad, mesh, placements, False, ctx.meta, None), None


def _replicated_but_varying(
    varying: tuple[str, ...], mesh: DeviceMesh, placements: Placements
) -> list[int]:
    """The mesh dims that replicate, along which the devices' tensors differ."""
    return [
        i
        for i, (placement, names) in enumerate(zip(placements, mesh_dim_axes(mesh), strict=True))
        if isinstance(placement, Replicate) and set(names) & set(varying)
    ]


def _shard(
    local: XLATensor,
    mesh: DeviceMesh,
    placements: Placements,
    run_check: bool,
    meta: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> XLAShardedTensor:
    """The sharded tensor; below autograd."""
    frame = frame_of(mesh)
    if local.is_meta and not isinstance(local, XLATensor):
        form = device_form(frame, tuple(local.shape), local.stride(), 0, local.dtype, meta=True)
        local = XLATensor(Storage(None, form), form)
    if meta is not None and local._form.frame is None:
        target = sharded_form(mesh, placements, *meta, 0, local.dtype, meta=local.is_meta)
        if has_own_piece(target):
            return of_own_pieces(local, target)
    if not local.is_meta:
        _place(local, mesh, placements, run_check)
    source = local._form.placed(frame)
    source.check_axes("from_local", frame)
    for i in _replicated_but_varying(source.varying, mesh, placements):
        if not run_check and not are_equal_along(local, mesh, i):
            raise UnsupportedOpError(
                f"from_local(placements={list(placements)}) on {mesh!r}: the local tensor differs "
                f"from device to device along {dim_name(mesh, i)!r}, where the placement is "
                "Replicate(). Give Shard(dim) or Partial() there, make it the same on all (a "
                "collective), or pass run_check=True, which takes coordinate 0's for all"
            )
    shape, stride = meta or global_meta(local.shape, mesh, placements, source.stride)
    own = {name for names in mesh_dim_axes(mesh) for name in names}
    target = sharded_form(
        mesh,
        placements,
        shape,
        stride,
        0,
        source.dtype,
        unreduced=unreduced_dims(placements, source, mesh),
        varying=tuple(name for name in source.varying if name not in own),
        meta=source.meta,
    )
    parts = local_form(target.reduced())
    if parts.shape != source.shape:
        raise PlacementError(
            f"from_local(shape={list(shape)}, placements={list(placements)}) on {mesh!r}: each "
            f"device would hold {list(parts.shape)}, the local tensor is {list(source.shape)}"
        )
    observer = events.observer
    if observer is not None:
        observer.from_local(source, target)
    if not target.unreduced and source.varying == parts.varying:
        # Both tensors share one storage, as in torch.
        step = CrossingStep(source, target)
        local._storage_.introduce(local)
        sharded = XLAShardedTensor(local._storage_, target, (*local._steps, step))
        local._storage_.share_writes(local, sharded)
        return sharded
    if target.meta:
        return XLAShardedTensor(Storage(None, target), target)
    return relayout(local, source, target, from_devices)


def _place(local: XLATensor, mesh: DeviceMesh, placements: Placements, run_check: bool) -> None:
    """Bring a process's own tensor to all devices: where the placements say that devices hold
    parts, each of several processes has its own."""
    frame, storage, running = frame_of(mesh), local._storage_, executor.current()
    if storage.form.frame is not None or not frame.process_axes or not running.has_values:
        running.place(storage, frame)
        return
    apart: set[str] = set()
    inside: set[str] = set()
    for placement, names in zip(placements, mesh_dim_axes(mesh), strict=True):
        inside.update(names)
        if run_check or not isinstance(placement, Replicate):
            apart.update(names)
    outside = set(frame.process_axes) - inside
    if outside and frame.one_each and not arrays.is_equal(storage.array):
        # Along axes that this mesh lacks a parameter is equal in all processes, a batch isn't.
        apart |= outside
    axes = tuple(name for name in frame.process_axes if name in apart)
    if axes:
        source_rank.check_beside(np.asarray(storage.array), frame, axes)
        storage.join(frame, axes)
    else:
        storage.place(frame)


def to_local(tensor: XLAShardedTensor, grad_placements: Sequence[Placement] | None) -> torch.Tensor:
    """`XLAShardedTensor.to_local`.

    Raises:
        UnsupportedOpError: a sharded dim doesn't divide.
    """
    if grad_placements is not None:
        grad_placements = normalize_placements(
            grad_placements, tensor.device_mesh, tensor.ndim, "to_local(grad_placements=)"
        )
    elif tensor._summed:
        parts = enumerate(_for_gradient(tensor.placements))
        grad_placements = tuple(Partial() if i in tensor._summed else p for i, p in parts)
    recording = torch.is_grad_enabled() and tensor.requires_grad
    form = tensor._form.on_current_frame()
    key = (tensor._storage_.version, form, grad_placements, recording)
    known = tensor._xla_local
    if known is not None and known[0] == key:
        local = known[1]()
        # Reuse it unless it was changed in place (t_, requires_grad_, ...).
        if local is not None and local._steps is known[2] and local.requires_grad is recording:
            return local
    view = _OwnPiece if has_own_piece(form) else _ToLocal
    local = view.apply(tensor, grad_placements)
    # A leaf's local tensor refers to the leaf by its grad_fn: a strong reference would be a cycle.
    reference = weakref.ref(local) if recording and tensor.is_leaf else _Strong(local)
    tensor._xla_local = (key, reference, local._steps)
    return local


def gives_gradient_as_it_is(tensor: XLAShardedTensor) -> bool:
    """Whether `to_local` was called last without ``grad_placements``."""
    return tensor._xla_local is None or tensor._xla_local[0][2] is None


def last_local(tensor: XLAShardedTensor) -> torch.Tensor | None:
    """The very object that `to_local` gave last, if it still exists."""
    known = tensor._xla_local
    return None if known is None else known[1]()


class _Strong:
    """A strong reference that is called like a weak one."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value
