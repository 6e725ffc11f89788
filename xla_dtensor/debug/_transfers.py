"""Redistributions as collectives: which, along what, how many bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from xla_dtensor.debug._records import (
    AnyLayout,
    Redistribution,
    Transfer,
    layout_text,
)
from xla_dtensor.forms.form import Form
from xla_dtensor.mesh.dim_names import dim_name
from xla_dtensor.mesh.layout import layout_of
from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.plans.one_mesh import on_one_mesh
from xla_dtensor.rules import TensorInfo
from xla_dtensor.rules.cost import Collective, collectives
from xla_dtensor.tensors.of_form import is_ours


def word(leaf: Any, form: Form) -> AnyLayout:
    return form_layout(form) if is_ours(leaf) else "cpu"


def form_layout(form: Form) -> AnyLayout:
    """The layout of a tensor of this form."""
    if form.mesh is None or form.placements is None:
        return f"per-device({', '.join(form.varying)})" if form.varying else "per-device"
    layout = layout_of(form.mesh, form.placements, len(form.shape))
    if not form.varying:
        return layout
    return f"{layout_text(layout)} per-device({', '.join(form.varying)})"


def one_transfer(collective: Collective, mesh: Any) -> Transfer:
    along = collective.along
    name = dim_name(mesh, along) if isinstance(along, int) else ", ".join(along)
    return Transfer(collective.kind, name, round(collective.nbytes))


def is_partial(form: Form) -> bool:
    return any(isinstance(p, Partial) for p in form.placements or ())


def reduced(form: Form) -> Form:
    assert form.mesh is not None and form.placements is not None
    placements = unpartial(form.placements)
    return form.with_placements(form.mesh, placements)


def redistribution(argument: str, source: Form, target: Form) -> Redistribution:
    """From one form of a tensor to another; of a per-device one that is replicated."""
    assert source.frame is not None and target.frame is not None
    words = form_layout(source), form_layout(target)
    if source.frame.device_ids != target.frame.device_ids:
        count = math.prod(target.frame.sizes[name] for names in target.dim_axes for name in names)
        nbytes = math.prod(target.shape) * target.dtype.itemsize // count
        return Redistribution(argument, *words, (Transfer("copy", "", nbytes),))
    source, target = on_one_mesh([source, target])
    mesh = source.mesh if source.mesh is not None else target.mesh
    before, after = (placements_on(form, mesh) for form in (source, target))
    info = TensorInfo(source.shape, before, target.dtype)
    return Redistribution(argument, *words, transfers_of(info, after, mesh))


def placements_on(form: Form, mesh: Any) -> tuple[Placement, ...]:
    return (Replicate(),) * mesh.ndim if form.placements is None else form.placements


def transfers_of(info: TensorInfo, target: Sequence[Placement], mesh: Any) -> tuple[Transfer, ...]:
    # A label of a part that nobody has: whatever the other parts are, this one is all of it.
    wanted = tuple(
        Replicate() if isinstance(new, Partial) and new != old else new
        for old, new in zip(info.placements, target, strict=True)
    )
    return tuple(one_transfer(each, mesh) for each in collectives(info, wanted, tuple(mesh.shape)))
