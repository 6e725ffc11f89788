"""``out=`` of overloads that are handled by a route."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base.torch_private import OUT_FORGOTTEN
from xla_dtensor.dispatch.execute import dispatch
from xla_dtensor.dispatch.metadata import resize
from xla_dtensor.forms.form import contiguous_stride
from xla_dtensor.plans.ops import handles, info_of


def into(out: Any, result: torch.Tensor) -> Any:
    """Write a result into an ``out=`` tensor, resized to it."""
    dispatch(torch.ops.aten.resize_.default, (out, list(result.shape)), {})
    return dispatch(torch.ops.aten.copy_.default, (out, result), {})


_RANGES_OUT = {
    "aten::arange.out": torch.ops.aten.arange.default,
    "aten::arange.start_out": torch.ops.aten.arange.start_step,
    "aten::logspace.out": torch.ops.aten.logspace.default,
    "aten::logspace.Tensor_Tensor_out": torch.ops.aten.logspace.Tensor_Tensor,
    "aten::logspace.Tensor_Scalar_out": torch.ops.aten.logspace.Tensor_Scalar,
    "aten::logspace.Scalar_Tensor_out": torch.ops.aten.logspace.Scalar_Tensor,
}


@handles(*_RANGES_OUT)
def _range_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Their numbers decide the shape, and ``out``'s dtype how the numbers are rounded."""
    out = kwargs["out"]
    return into(out, _RANGES_OUT[info_of(func).name](*args, dtype=out.dtype))


@handles(*(f"aten::{name}" for name in OUT_FORGOTTEN))
def _write_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The form without ``out=``, then the write: torch's own composite forgets it for tensor
    subclasses."""
    kwargs = dict(kwargs)
    out = kwargs.pop("out")
    result = torch.linalg.matrix_rank(*args, **kwargs)
    resize(out, tuple(result.shape), contiguous_stride(tuple(result.shape)), func.name())
    return out.copy_(result)
