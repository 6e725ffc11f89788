"""Autograd nodes around a custom op: between gradients of sharded tensors and of per-device ones.

On each device ``backward`` computes with what that device has. For the gradients of the whole to
come out, three things must hold:

- A cotangent of a *partial* result is each device's own: every device has made a part of the sum,
  and what it computes from the cotangent is a contribution of its own. So it counts as varying
  (of an average, divided by the number of parts).
- An input that the devices *share* along a mesh dim gets the sum of their contributions. Where all
  of them have computed one and the same gradient (it doesn't vary), that is the gradient: of
  results that are replicated, or after a collective in ``backward``.
- An input that is a *part* of a sum gets the gradient of the sum, which all parts have, the op
  being linear in it.

Contributions to replicated results can't be told from contributions to others, so a call that has
both kinds of cotangent along a mesh dim, and an input to sum over it, raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from xla_dtensor.base.torch_private import current_backward
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.per_device import Axes
from xla_dtensor.mesh import Frame, mesh_dim_axes
from xla_dtensor.mesh.layout import Layout
from xla_dtensor.movement.vary import sum_over, vary
from xla_dtensor.tensors.device_tensor import XLATensor


@dataclass
class Pass:
    """Which kinds of cotangents have arrived at a call's results in the present backward pass.

    Attributes:
        op_name: of the call.
        frame: of its tensors.
        axes: those of the meshes that its tensors are sharded over. Along others (data parallelism
            around tensor parallelism) each device has a call of its own, and nothing is summed.
        task: torch's number of the pass.
        own: the axes along which some cotangent that arrived is each device's own.
        shared: those along which some cotangent is of a replicated result.
    """

    op_name: str
    frame: Frame
    axes: frozenset[str]
    task: int | None = None
    own: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)

    def arrived(self, own: set[str]) -> None:
        """A cotangent of a result that is each device's own along ``own``."""
        task = current_backward()
        # Torch numbers backward passes: another one (retain_graph=True) starts anew.
        if task != self.task:
            self.task = task
            self.own.clear()
            self.shared.clear()
        self.own |= own
        self.shared |= self.axes - own


def partial_axes(layout: Layout, *reductions: str) -> Axes:
    """The frame axes over which one of ``reductions`` is pending."""
    groups = zip(layout.partial, mesh_dim_axes(layout.mesh), strict=True)
    return tuple(axis for op, axes in groups if op in reductions for axis in axes)


def _own_axes(layout: Layout, local: XLATensor) -> set[str]:
    groups = zip(layout.placements, mesh_dim_axes(layout.mesh), strict=True)
    cut = {axis for p, axes in groups if not isinstance(p, Replicate) for axis in axes}
    return cut | set(local.varying)


def _same(tensor: XLATensor) -> XLATensor:
    """Another tensor on the same memory."""
    tensor._storage_.introduce(tensor)
    alias = XLATensor(tensor._storage_, tensor._form, tensor._steps)
    tensor._storage_.share_writes(tensor, alias)
    return alias


class Result(torch.autograd.Function):
    """A per-device result on its way into the global view."""

    @staticmethod
    def forward(ctx: Any, local: XLATensor, layout: Layout, state: Pass) -> XLATensor:
        ctx.of = layout, state, _own_axes(layout, local)
        ctx.made = local  # else nobody counts writes to what forward may have saved
        ctx.set_materialize_grads(False)
        return _same(local)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None
        layout, state, own = ctx.of
        state.arrived(own)
        _refuse_choosing(layout, f"result of {state.op_name!r}")
        averaged = partial_axes(layout, "avg")
        for axis in averaged:
            grad = grad / state.frame.sizes[axis]
        return vary(grad, (*partial_axes(layout, "sum"), *averaged), state.frame), None, None


class Input(torch.autograd.Function):
    """A per-device argument on its way into ``forward``.

    ``layout`` is that of the sharded tensor that it is the local part of, if that is partial;
    ``what`` names it in messages.
    """

    @staticmethod
    def forward(
        ctx: Any, local: XLATensor, layout: Layout | None, state: Pass, what: str
    ) -> XLATensor:
        ctx.of = local.varying, layout, state, what
        ctx.set_materialize_grads(False)
        return _same(local)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None, None
        own, layout, state, what = ctx.of
        axes = tuple(a for a in grad.varying if a in state.axes and a not in own)
        mixed = state.own & state.shared & set(axes)
        if mixed:
            raise UnsupportedOpError(
                f"the gradient of {what} differs from device to device along {sorted(mixed)}, and "
                "gradients have arrived both for results that are replicated there and for results "
                "that aren't: what each device contributed can't be told apart. Sum it in backward "
                "(xla_dtensor.collectives.all_reduce), or make the replicated results with a "
                "DFunction of their own"
            )
        grad = sum_over(grad, axes, state.frame)
        if layout is not None:
            _refuse_choosing(layout, what)
            for axis in partial_axes(layout, "sum"):
                if axis in grad.varying:
                    grad = sum_over(grad, (axis,), state.frame) / state.frame.sizes[axis]
            grad = sum_over(grad, partial_axes(layout, "avg"), state.frame)
        return grad, None, None, None


def _refuse_choosing(layout: Layout, what: str) -> None:
    """Raise for reductions whose gradient depends on which device had the value."""
    for op in layout.partial:
        if op not in (None, "sum", "avg"):
            raise UnsupportedOpError(
                f"the gradient of the {what}, {layout!r}, depends on which device's value was the "
                f"{op}; reduce with a collective in forward and give its gradient in backward"
            )
