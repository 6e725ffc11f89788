"""Copies tensors from the devices of one stage to those of another.

A tensor keeps its layout: along the mesh dims of the same names, with the same placements, varying
along the same axes. Between meshes of one shape each device's part is then copied to the device
that has its place in the other mesh, and nothing is gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate

from xla_dtensor.errors import MeshMismatchError
from xla_dtensor.forms.form import Form, device_form, sharded_form
from xla_dtensor.forms.read import read
from xla_dtensor.forms.sharing import launching
from xla_dtensor.mesh import frame_of
from xla_dtensor.movement.relayout import move
from xla_dtensor.runtime import arrays
from xla_dtensor.tensors.of_form import is_ours, new_tensor


def to_stage(value: Any, mesh: DeviceMesh, what: str) -> Any:
    """``value`` on the devices of ``mesh``; gradients go back the same way.

    Args:
        value: a tensor of any mesh, of the default device or the CPU; anything else stays as it is.
        mesh: of a stage.
        what: it is, for messages.

    Raises:
        MeshMismatchError: ``mesh`` has no dims of the names along which the tensor is laid out.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not is_ours(value):
        value = value.to("xla")
    if value._form.frame is not None and _is_there(value._form, mesh):
        return value
    return _ToStage.apply(value, mesh, what)


def _is_there(form: Form, mesh: DeviceMesh) -> bool:
    return form.frame is not None and form.frame.device_ids == frame_of(mesh).device_ids


class _ToStage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, mesh: DeviceMesh, what: str) -> Any:
        ctx.source, ctx.what = tensor._form, what
        return _moved(tensor, mesh, what)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        frame = ctx.source.frame
        if frame is None:  # of the default device, which any frame's tensors may join
            return grad, None, None
        mesh = ctx.source.mesh or frame.root
        return to_stage(grad, mesh, f"the gradient of {ctx.what}"), None, None


def _moved(tensor: Any, mesh: DeviceMesh, what: str) -> Any:
    """A tensor of its own on the devices of ``mesh``; below autograd."""
    source: Form = tensor._form
    frame = frame_of(mesh)
    about = source.shape, None, 0, source.dtype
    if source.mesh is None:
        target = device_form(frame, *about, varying=_varying(source, mesh, what))
    else:
        own, placements = _same_dims(source, mesh, what)
        if source.mesh.shape != own.shape and not source.varying:
            return move(tensor, own, placements)
        varying = _varying(source, mesh, what)
        unreduced = tuple(own.mesh_dim_names.index(name) for name in _names(source))
        target = sharded_form(own, placements, *about, unreduced=unreduced, varying=varying)
    if target.array_shape != source.array_shape:
        raise MeshMismatchError(
            f"{what}: a tensor of shape {list(source.shape)} on {source.mesh or source.frame!r} "
            f"can't go to {mesh!r}, of another shape, while it has a value for each device: "
            "give the stages meshes of one shape"
        )
    with launching():  # another thread's step may take the array over
        return new_tensor(arrays.put(read(tensor), target.sharding), target)


def _names(form: Form) -> tuple[str, ...]:
    """The names of the mesh dims along which a reduction is pending."""
    assert form.mesh is not None
    names = form.mesh.mesh_dim_names or ()
    return tuple(names[i] for i in form.unreduced)


def _same_dims(form: Form, mesh: DeviceMesh, what: str) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The part of ``mesh`` with the dims of the tensor's mesh, and the placements on it."""
    assert form.mesh is not None and form.placements is not None
    names = mesh.mesh_dim_names or ()
    own = form.mesh.mesh_dim_names or ()
    kept: list[tuple[str, Placement]] = []
    for i, placement in enumerate(form.placements):
        name = own[i] if i < len(own) else ""
        if name in names:
            kept.append((name, placement))
        elif not isinstance(placement, Replicate):
            raise MeshMismatchError(
                f"{what}: a tensor on {form.mesh!r} with placements {list(form.placements)} can't "
                f"go to the stage's mesh {mesh!r}, which has no dim "
                f"{name or i!r}: lay it out along the stage's dims, "
                "x.redistribute(mesh, placements)"
            )
    if not kept:  # replicated along dims that the stage's mesh doesn't have
        return mesh, (Replicate(),) * mesh.ndim
    return mesh[tuple(name for name, _ in kept)], tuple(placement for _, placement in kept)


def _varying(form: Form, mesh: DeviceMesh, what: str) -> tuple[str, ...]:
    """The axes of ``mesh``'s frame along which a tensor varies there.

    Of roots of one kind, as stages have them, those with the same place: a frame's axes may have
    the names of any mesh of its root that has cut it first, so names say nothing there.
    """
    assert form.frame is not None or not form.varying
    frame, found = frame_of(mesh), []
    for name in form.varying:
        before = form.frame
        axis = next(axis for axis in before.axes if axis.name == name)  # type: ignore[union-attr]
        alike = _kind(before.root) == _kind(frame.root)  # type: ignore[union-attr]
        wanted = (axis.size, axis.stride) if alike else (axis.size, name)
        there = [a.name for a in frame.axes if (a.size, a.stride if alike else a.name) == wanted]
        if not there:
            raise MeshMismatchError(
                f"{what}: a tensor of shape {list(form.shape)} that varies along {name!r} of "
                f"{before!r} can't go to the stage's mesh {mesh!r}: it needs a dim of that "
                f"{'place' if alike else 'name'} and size"
            )
        found += there
    return tuple(found)


def _kind(root: DeviceMesh) -> Any:
    return root.mesh_dim_names, tuple(root.shape)
