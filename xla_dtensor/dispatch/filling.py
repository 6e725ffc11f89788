"""``fill_`` of a tensor whose sum is pending: as in torch, each part is filled."""

from __future__ import annotations

import math
from typing import Any

import torch

from xla_dtensor.dispatch.ops import handles


@handles("aten::fill_.Scalar")
def _fill(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, value = args
    form = x._form
    if form.placements is None or not any(p.is_partial() for p in form.placements):
        return NotImplemented
    parts = {
        op: math.prod(
            size
            for size, placement in zip(form.mesh.shape, form.placements, strict=True)
            if placement.is_partial(op)
        )
        for op in ("sum", "product")
    }
    whole = value ** parts["product"] * parts["sum"]
    return torch.ops.aten.fill_.Tensor(x, x.new_full((), whole))
