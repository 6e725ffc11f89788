"""Fake quantization: values rounded to those that an integer type would have, in float.

A value becomes ``(clamp(round(x / scale) + zero_point) - zero_point) * scale``; the mask says where
nothing was clamped, and is what the gradient is multiplied with. As in torch ``1 / scale`` is
float32, which decides how values in the middle are rounded. An infinite value becomes the largest
or the least; torch's CPU kernel for channels turns both into the least.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.registry import lowers

Quantized = tuple[jax.Array, jax.Array]


def _quantized(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    quant_min: int,
    quant_max: int,
    product: Any,
) -> Quantized:
    """``product``: the dtype of the last one."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    inverse = (1 / scale.astype(jnp.float32)).astype(wide)
    level = jnp.round(x.astype(wide) * inverse) + zero_point.astype(wide)
    level = jnp.where(jnp.isnan(level), -jnp.inf, level)  # as an integer a NaN is the least
    inside = (level >= quant_min) & (level <= quant_max)
    kept = jnp.clip(level, quant_min, quant_max).astype(product) - zero_point.astype(product)
    return (kept * scale.astype(product)).astype(x.dtype), inside


@meta_of(
    "fake_quantize_per_tensor_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fake_quantize_per_channel_affine_cachemask",
)
def _like(x, *others):
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


@lowers("fake_quantize_per_tensor_affine_cachemask")
def per_tensor(x, scale, zero_point, quant_min, quant_max):
    scale, zero_point = jnp.float32(scale), jnp.float32(zero_point)
    return _quantized(x, scale, zero_point, quant_min, quant_max, jnp.float32)


@lowers("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def per_tensor_on_devices(x, scale, zero_point, enabled, quant_min, quant_max):
    scale, zero_point = scale.reshape(()), zero_point.reshape(())
    rounded, inside = _quantized(x, scale, zero_point, quant_min, quant_max, jnp.float32)
    off = enabled.reshape(()) == 0
    return jnp.where(off, x, rounded), inside | off


@lowers("fake_quantize_per_channel_affine_cachemask")
def per_channel(x, scale, zero_point, axis, quant_min, quant_max):
    along = [1] * x.ndim
    along[axis] = -1
    scale, zero_point = scale.reshape(along), zero_point.reshape(along)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return _quantized(x, scale, zero_point, quant_min, quant_max, wide)
