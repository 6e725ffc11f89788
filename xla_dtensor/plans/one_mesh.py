"""Writes the layouts of a call's tensors on several submeshes of one root as layouts on one mesh.

`clip_grad_norm_` makes such calls: gradients on `mesh["tp"]` and on `mesh` in one list.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate

from xla_dtensor.forms.form import Form, sharded_form
from xla_dtensor.mesh import mesh_dim_axes


def on_one_mesh(forms: list[Any]) -> list[Any]:
    """The forms of a call's tensors as on one mesh, where no array has to change for that.

    A tensor on ``mesh["dp"]`` that doesn't vary along the other dims of ``mesh`` is the same on all
    devices along them: replicated on ``mesh``. The array stays as it is. The forms come back
    unchanged where no one mesh has all the dims (then the call is refused).
    """
    sharded = [form for form in forms if isinstance(form, Form) and form.mesh is not None]
    meshes: dict[DeviceMesh, None] = {form.mesh: None for form in sharded if form.mesh is not None}
    frames = {form.frame: None for form in sharded if form.frame is not None}
    if len(meshes) < 2 or len(frames) > 1:
        return forms
    (frame,) = frames
    for candidate in (*sorted(meshes, key=lambda mesh: -mesh.ndim), frame.root):
        lifted = [_lifted(form, candidate) for form in sharded]
        if None not in lifted:
            found = dict(zip(sharded, lifted, strict=True))
            return [found.get(form, form) if isinstance(form, Form) else form for form in forms]
    return forms


def _lifted(form: Form, mesh: DeviceMesh) -> Form | None:
    """The same layout on ``mesh``, which may have more dims; None if it can't be written there."""
    if form.mesh == mesh:
        return form
    assert form.mesh is not None and form.placements is not None
    own, axes = mesh_dim_axes(form.mesh), mesh_dim_axes(mesh)
    where = [axes.index(names) if names in axes else -1 for names in own]
    varies = {name for names in axes for name in names} & set(form.varying)
    # The order of mesh dims is that in which they shard a tensor dim.
    if varies or -1 in where or where != sorted(where):
        return None
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for i, placement in zip(where, form.placements, strict=True):
        placements[i] = placement
    return sharded_form(
        mesh,
        tuple(placements),
        form.shape,
        form.stride,
        form.offset,
        form.dtype,
        unreduced=tuple(where[i] for i in form.unreduced),
        varying=form.varying,
        meta=form.meta,
    )
