"""Redistributes the tensors of a call on several meshes over the same devices to one mesh.

Programs for torch_xla make such calls.

Only for meshes of which `mesh.combinable` says that they may be combined; for others it is an
error, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.forms.form import Form
from xla_dtensor.mesh.combinable import may_meet, placements_on
from xla_dtensor.plans.call import Call
from xla_dtensor.plans.one_mesh import on_one_mesh
from xla_dtensor.plans.plan import mutated_leaves
from xla_dtensor.tensors.of_form import is_ours


def run(
    call: Call, func: Any, args: Any, kwargs: dict[str, Any], dispatch: Callable[..., Any]
) -> Any:
    """Execute a call whose tensors are on several meshes that may meet.

    Returns:
        its results, on the mesh of what it writes, else on that to which the fewest values have to
        be moved; ``NotImplemented`` if there is one mesh, or they may not meet.
    """
    forms = [f for f in on_one_mesh(call.forms) if f.__class__ is Form and f.mesh is not None]
    meshes: dict[DeviceMesh, None] = {form.mesh: None for form in forms}
    if len(meshes) < 2 or any(form.varying for form in forms) or not may_meet(meshes):
        return NotImplemented
    written = {call.leaves[i]._form.mesh for i in mutated_leaves(call)} - {None}
    if len(written) > 1:
        return NotImplemented
    target = written.pop() if written else _cheapest(list(meshes), forms)
    moved: dict[int, Any] = {}

    def bring(leaf: Any) -> Any:
        form = leaf._form
        if form.mesh is None or form.mesh == target:
            return leaf
        if id(leaf) not in moved:
            placements, _ = placements_on(target, form.mesh, form.placements, len(form.shape))
            moved[id(leaf)] = leaf.redistribute(target, placements)
        return moved[id(leaf)]

    with torch.no_grad():  # autograd has seen the call already
        args, kwargs = pytree.tree_map_only(is_ours, bring, (tuple(args), kwargs))
    return dispatch(func, args, kwargs)


def _cheapest(meshes: list[DeviceMesh], forms: list[Any]) -> DeviceMesh:
    """The mesh to which the fewest elements have to be moved; of several the one with the most
    dims, then the one that comes first."""

    def moved(mesh: DeviceMesh) -> int:
        return sum(
            math.prod(form.shape)
            for form in forms
            if form.mesh != mesh
            and not placements_on(mesh, form.mesh, form.placements, len(form.shape))[1]
        )

    def dims(mesh: DeviceMesh) -> int:
        return sum(size > 1 for size in mesh.shape)

    return min(meshes, key=lambda mesh: (moved(mesh), -dims(mesh)))
