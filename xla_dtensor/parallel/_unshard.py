"""The autograd function that gathers a parameter, and reduces its gradient in backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    pass


class Unshard(torch.autograd.Function):
    """From the sharded parameter to the whole one."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, managed: Any, global_view: bool) -> Any:
        ctx.managed, ctx.global_view = managed, global_view
        ctx.reduces = managed.reduces_by_forward()
        ctx.set_materialize_grads(False)
        return managed._gathered(parameter, global_view)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        managed = ctx.managed
        managed.release()
        managed._state.after_backward(managed)
        if grad is None:
            return None, None, None
        with torch.no_grad():
            return managed.reduce(grad, ctx.global_view, ctx.reduces), None, None
