"""The route of what quantization-aware training calls: observe a range, then quantize in float.

Its statistics are tensors that it writes and, where there are none yet, resizes, and whether it
observes and quantizes are tensors, too: so it is a composition of operations of torch's.
"""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.plans.ops import handles

_LEAST_SCALE = 6.1e-5  # torch's


@handles("aten::_fused_moving_avg_obs_fq_helper.default")
def _observe_and_quantize(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return _observed(*args, **kwargs)


def _observed(
    x: torch.Tensor,
    /,
    observer_on: torch.Tensor,
    fake_quant_on: torch.Tensor,
    running_min: torch.Tensor,
    running_max: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> Any:
    axis, per_channel, low, high = ch_axis, per_row_fake_quant, running_min, running_max
    if axis >= x.dim():
        raise RuntimeError("Error in fused_moving_avg_obs_fake_quant: ch_axis must be < self.dim()")
    if per_channel and not low.numel():
        for tensor in (low, high, scale, zero_point):
            tensor.resize_(x.shape[axis])
        low.fill_(torch.inf)
        high.fill_(-torch.inf)
    if per_channel:
        least, most = torch.aminmax(x.transpose(0, axis).flatten(1), dim=1)
    else:
        least, most = torch.aminmax(x)
    observes = (observer_on != 0).reshape(())
    for old, now in zip((low, high), (least, most), strict=True):
        now = now.to(old.dtype)
        moved = torch.where(old.isinf(), now, old + averaging_const * (now - old))
        old.copy_(torch.where(observes, moved, old))
    new = _parameters(low, high, quant_min, quant_max, symmetric_quant)
    for old, now in zip((scale, zero_point), new, strict=True):
        old.copy_(torch.where(fake_quant_on != 0, now.to(old.dtype), old))
    if not per_channel:
        return torch.ops.aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
            x, scale, zero_point, fake_quant_on, quant_min, quant_max
        )
    rounded, inside = torch.ops.aten.fake_quantize_per_channel_affine_cachemask(
        x, scale, zero_point, axis, quant_min, quant_max
    )
    off = fake_quant_on == 0
    return torch.where(off, x, rounded), inside | off


def _parameters(
    low: torch.Tensor, high: torch.Tensor, quant_min: int, quant_max: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of ranges, as FBGEMM chooses them (its ``ChooseQuantizationParams``):
    0 is in the range and has a level of its own; in double precision."""
    low, high = low.double().clamp(max=0), high.double().clamp(min=0)
    both = (low < 0) & (high > 0) & symmetric
    half = (quant_max - quant_min) // 2
    widest = torch.maximum((low / -(half + 1)).abs(), (high / half).abs())
    low = torch.where(both, widest * -(half + 1), low)
    high = torch.where(both, widest * half, high)
    scale = (high - low) / (quant_max - quant_min)
    single = scale.float()
    scale = torch.where((single == 0) | (1 / single).isinf(), 0.1, scale)
    small = scale < _LEAST_SCALE
    grown = _LEAST_SCALE / scale
    low = torch.where(small, low * grown, low)
    high = torch.where(small, high * grown, high)
    scale = torch.where(small, _LEAST_SCALE, scale)
    from_low, from_high = quant_min - low / scale, quant_max - high / scale
    of_low = abs(quant_min) + (low / scale).abs()  # what rounding may add up to
    of_high = abs(quant_max) + (high / scale).abs()
    zero_point = torch.where(of_low < of_high, from_low, from_high)
    zero_point = torch.where(both, (quant_min + quant_max) / 2, zero_point)
    return scale, zero_point.clamp(quant_min, quant_max).round()
