"""Softmax and the normalisation layers, forward and backward.

Half-precision inputs are computed, and saved statistics kept, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.base.dtypes import to_jax_dtype, to_torch_dtype
from xla_dtensor.lowering.dims import axes_of
from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.promotion import math_dtype, promote_for_math
from xla_dtensor.lowering.registry import lowers

# ------------------------------------------------------------------------------------- softmax


def _shifted(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """``x`` minus its maximum, so that its exponentials cannot overflow.

    Raises:
        NotImplementedError: ``x`` isn't floating-point; torch's meta kernels let integers through,
            its CPU kernels don't.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise NotImplementedError(f"softmax is not implemented for {to_torch_dtype(x.dtype)}")
    # `initial`: a dim of size 0 has no maximum, and torch's result is empty.
    return x - jnp.max(x, axes, keepdims=True, initial=-jnp.inf)


@lowers("_softmax")
def softmax(x, dim, half_to_float=False):
    (x,) = promote_for_math(x)
    axes = axes_of(dim, x.ndim)
    weights = jnp.exp(_shifted(x, axes))
    return weights / jnp.sum(weights, axes, keepdims=True)


@lowers("_safe_softmax")
def safe_softmax(x, dim, dtype=None):
    """Softmax that gives zeros, not NaNs, where everything along ``dim`` is -inf."""
    if dtype is not None:
        x = x.astype(to_jax_dtype(dtype))
    masked = jnp.all(x == -jnp.inf, axes_of(dim, x.ndim), keepdims=True)
    return jnp.where(masked, 0, softmax(x, dim))


@lowers("_log_softmax")
def log_softmax(x, dim, half_to_float=False):
    (x,) = promote_for_math(x)
    axes = axes_of(dim, x.ndim)
    shifted = _shifted(x, axes)
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), axes, keepdims=True))


@lowers("_softmax_backward_data")
def softmax_backward(grad, result, dim, input_dtype=None):
    grad, result = promote_for_math(grad, result)
    weighted = grad * result
    return weighted - result * jnp.sum(weighted, axes_of(dim, grad.ndim), keepdims=True)


@lowers("_log_softmax_backward_data")
def log_softmax_backward(grad, result, dim, input_dtype=None):
    grad, result = promote_for_math(grad, result)
    return grad - jnp.exp(result) * jnp.sum(grad, axes_of(dim, grad.ndim), keepdims=True)


# -------------------------------------------------------------------------- layer and RMS norm


def _wide(*arrays: jax.Array | None) -> tuple[jax.Array | None, ...]:
    """Each array in its computation dtype."""
    return tuple(None if a is None else a.astype(math_dtype(a.dtype)) for a in arrays)


def _affine(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _moments(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Mean and (biased) variance over ``axes``, kept as dims of size 1."""
    average = jnp.mean(x, axes, keepdims=True)
    return average, jnp.mean(jnp.square(x - average), axes, keepdims=True)


def _normalized_backward(
    grad: jax.Array, normalized: jax.Array, rstd: jax.Array, axes: Sequence[int]
) -> jax.Array:
    """Gradient of ``(x - mean) * rstd`` with the statistics taken over ``axes``."""
    return rstd * (
        grad
        - jnp.mean(grad, axes, keepdims=True)
        - normalized * jnp.mean(grad * normalized, axes, keepdims=True)
    )


def _split_axes(ndim: int, inner: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(range(ndim - inner)), tuple(range(ndim - inner, ndim))


@lowers("native_layer_norm", symbolic_floats=True)
def layer_norm(x, normalized_shape, weight, bias, eps):
    x, weight, bias = _wide(x, weight, bias)
    _, inner = _split_axes(x.ndim, len(normalized_shape))
    average, variance = _moments(x, inner)
    rstd = jax.lax.rsqrt(variance + eps)
    return _affine((x - average) * rstd, weight, bias), average, rstd


@lowers("native_layer_norm_backward")
def layer_norm_backward(grad, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    grad, x, mean, rstd, weight = _wide(grad, x, mean, rstd, weight)
    outer, inner = _split_axes(x.ndim, len(normalized_shape))
    normalized = (x - mean) * rstd
    return (
        _normalized_backward(_affine(grad, weight, None), normalized, rstd, inner)
        if output_mask[0]
        else None,
        jnp.sum(grad * normalized, outer) if output_mask[1] else None,
        jnp.sum(grad, outer) if output_mask[2] else None,
    )


@lowers("_weight_norm_interface_backward")
def weight_norm_backward(grad, v, g, norms, dim):
    rest = tuple(d for d in range(v.ndim) if d != dim % v.ndim)
    grad, v, g, norms = _wide(grad, v, g, norms)
    grad_g = jnp.sum(grad * v, rest, keepdims=True) / norms
    return (grad - v * grad_g / norms) * g / norms, grad_g


@lowers("_fused_rms_norm", symbolic_floats=True)
def rms_norm(x, normalized_shape, weight, eps):
    x, weight = _wide(x, weight)
    _, inner = _split_axes(x.ndim, len(normalized_shape))
    if eps is None:
        eps = jnp.finfo(x.dtype).eps
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(x), inner, keepdims=True) + eps)
    return _affine(x * rstd, weight, None), rstd


@lowers("_fused_rms_norm_backward")
def rms_norm_backward(grad, x, normalized_shape, rstd, weight, output_mask):
    grad, x, rstd, weight = _wide(grad, x, rstd, weight)
    outer, inner = _split_axes(x.ndim, len(normalized_shape))
    normalized = x * rstd
    grad_normalized = _affine(grad, weight, None)
    projection = jnp.mean(grad_normalized * normalized, inner, keepdims=True)
    return (
        rstd * (grad_normalized - normalized * projection) if output_mask[0] else None,
        jnp.sum(grad * normalized, outer) if output_mask[1] and weight is not None else None,
    )


@lowers("rms_norm", symbolic_floats=True)
def rms_norm_forward(x, normalized_shape, weight=None, eps=None):
    return rms_norm(x, normalized_shape, weight, eps)[0]


# ---------------------------------------------------------------------------------- group norm


def _by_channel(v: jax.Array | None, ndim: int) -> jax.Array | None:
    """A per-channel vector, shaped to broadcast against ``[N, C, ...]``."""
    return None if v is None else v.reshape((1, -1) + (1,) * (ndim - 2))


@lowers("native_group_norm", symbolic_floats=True)
def group_norm(x, weight, bias, N, C, HxW, group, eps):
    shape = x.shape
    x, weight, bias = _wide(x, weight, bias)
    grouped = x.reshape(N, group, C // group * HxW)
    average, variance = _moments(grouped, (2,))
    rstd = jax.lax.rsqrt(variance + eps)
    normalized = ((grouped - average) * rstd).reshape(shape)
    ndim = len(shape)
    result = _affine(normalized, _by_channel(weight, ndim), _by_channel(bias, ndim))
    return result, average[..., 0], rstd[..., 0]


@lowers("native_group_norm_backward")
def group_norm_backward(grad, x, mean, rstd, weight, N, C, HxW, group, output_mask):
    shape, ndim = x.shape, x.ndim
    grad, x, mean, rstd, weight = _wide(grad, x, mean, rstd, weight)
    mean, rstd = mean[..., None], rstd[..., None]
    grouped = (N, group, C // group * HxW)
    normalized = (x.reshape(grouped) - mean) * rstd
    scaled = _affine(grad, _by_channel(weight, ndim), None).reshape(grouped)
    others = (0, *range(2, ndim))
    return (
        _normalized_backward(scaled, normalized, rstd, (2,)).reshape(shape)
        if output_mask[0]
        else None,
        jnp.sum(grad * normalized.reshape(shape), others) if output_mask[1] else None,
        jnp.sum(grad, others) if output_mask[2] else None,
    )


# ---------------------------------------------------------------------------------- batch norm

# Overloads that update running_mean and running_var in place -> the functional overload whose
# last two results are the new running statistics. `native_batch_norm` mutates too, although its
# schema does not say so. The overloads take the same arguments.
FUNCTIONAL_BATCH_NORM = {
    "aten::native_batch_norm.default": "aten::_native_batch_norm_legit_functional.default",
    "aten::_native_batch_norm_legit.default": "aten::_native_batch_norm_legit_functional.default",
    "aten::_batch_norm_with_update.default": "aten::_batch_norm_with_update_functional.default",
}


def _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """(result, saved mean, saved rstd, new running mean, new running var)."""
    ndim = x.ndim
    x, weight, bias, old_mean, old_var = _wide(x, weight, bias, running_mean, running_var)
    new_mean, new_var = running_mean, running_var
    if training:
        axes = (0, *range(2, ndim))
        mean, variance = (jnp.squeeze(m, axes) for m in _moments(x, axes))
        if old_mean is not None:
            new_mean = old_mean * (1 - momentum) + mean * momentum
        if old_var is not None:
            count = int(np.prod([x.shape[a] for a in axes]))
            unbiased = variance * (count / max(count - 1, 1))
            new_var = old_var * (1 - momentum) + unbiased * momentum
    else:
        mean, variance = old_mean, old_var
    rstd = jax.lax.rsqrt(variance + eps)
    normalized = (x - _by_channel(mean, ndim)) * _by_channel(rstd, ndim)
    result = _affine(normalized, _by_channel(weight, ndim), _by_channel(bias, ndim))
    if not training:  # nothing is saved
        mean = rstd = jnp.zeros(0, result.dtype)
    return result, mean, rstd, new_mean, new_var


# torch's meta kernels give saved statistics where the CPU's kernels save none.
@meta_of("_native_batch_norm_legit_no_training")
def _(x, weight, bias, running_mean, running_var, momentum, eps):
    saved = x.new_empty(0, dtype=running_mean.dtype)
    return torch.empty_like(x), saved, torch.empty_like(saved)


@meta_of("_batch_norm_no_update")
def _(x, weight, bias, running_mean, running_var, momentum, eps):
    saved = x.new_empty(0, dtype=running_mean.dtype)
    reserve = x.new_empty(0, dtype=torch.uint8)
    return torch.empty_like(x), saved, torch.empty_like(saved), reserve


@meta_of("_native_batch_norm_legit_functional")
def _(x, weight, bias, running_mean, running_var, training, momentum, eps):
    args = (x, weight, bias, running_mean, running_var, training, momentum, eps)
    result, mean, rstd, *running = torch.ops.aten._native_batch_norm_legit_functional(*args)
    if not training:
        mean, rstd = mean.new_empty(0), rstd.new_empty(0)
    return result, mean, rstd, *running


@meta_of("native_batch_norm")
def _(x, weight, bias, running_mean, running_var, training, momentum, eps):
    args = (x, weight, bias, running_mean, running_var, training, momentum, eps)
    result, mean, rstd = torch.ops.aten.native_batch_norm(*args)
    return (result, mean, rstd) if training else (result, mean.new_empty(0), rstd.new_empty(0))


@lowers("_native_batch_norm_legit_functional", symbolic_floats=True)
def batch_norm_functional(x, weight, bias, running_mean, running_var, training, momentum, eps):
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)


@lowers("native_batch_norm", symbolic_floats=True)
def native_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """Without the update of the running statistics: see `FUNCTIONAL_BATCH_NORM`."""
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@lowers("_native_batch_norm_legit.no_stats", symbolic_floats=True)
def batch_norm_no_stats(x, weight, bias, training, momentum, eps):
    return _batch_norm(x, weight, bias, None, None, True, momentum, eps)[:3]


@lowers("_native_batch_norm_legit_no_training", symbolic_floats=True)
def batch_norm_no_training(x, weight, bias, running_mean, running_var, momentum, eps):
    return _batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


def _reserve() -> jax.Array:
    """What a fused kernel would keep for its backward: nothing here."""
    return jnp.zeros((0,), np.uint8)


@lowers("_batch_norm_with_update_functional")
def batch_norm_with_update(x, weight, bias, running_mean, running_var, momentum, eps):
    *results, new_mean, new_var = _batch_norm(
        x, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return *results, _reserve(), new_mean, new_var


@lowers("_batch_norm_no_update")
def batch_norm_no_update(x, weight, bias, running_mean, running_var, momentum, eps):
    results = _batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)
    return *results[:3], _reserve()


@lowers("native_batch_norm_backward", symbolic_floats=True)
def native_batch_norm_backward(
    grad, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):
    ndim, others = x.ndim, (0, *range(2, x.ndim))
    grad, x, weight = _wide(grad, x, weight)
    mean, rstd = _wide(save_mean, save_invstd)
    if not train:
        mean, variance = _wide(running_mean, running_var)
        rstd = jax.lax.rsqrt(variance + eps)
    mean, rstd = _by_channel(mean, ndim), _by_channel(rstd, ndim)
    normalized = (x - mean) * rstd
    grad_input = None
    if output_mask[0]:
        scaled = _affine(grad, _by_channel(weight, ndim), None)
        grad_input = (
            _normalized_backward(scaled, normalized, rstd, others) if train else scaled * rstd
        )
    return (
        grad_input,
        jnp.sum(grad * normalized, others) if output_mask[1] else None,
        jnp.sum(grad, others) if output_mask[2] else None,
    )


@lowers("batch_norm_backward", symbolic_floats=True)
def batch_norm_backward(
    grad,
    x,
    weight,
    running_mean,
    running_var,
    save_mean,
    save_var,
    update,
    eps,
    output_mask,
    reserve,
):
    """``save_var`` holds the reciprocal standard deviation, whatever its name says."""
    return native_batch_norm_backward(
        grad, x, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )
