"""Loss functions and their backward overloads."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.partitioned.scatter import narrow
from xla_dtensor.lowering.promotion import is_exactly, promote_for_math
from xla_dtensor.lowering.registry import lowers

NONE, MEAN, SUM = 0, 1, 2  # torch's at::Reduction


def _reduce(loss: jax.Array, reduction: int) -> jax.Array:
    if reduction == MEAN:
        return jnp.sum(loss) / jnp.asarray(loss.size, loss.dtype)
    return jnp.sum(loss) if reduction == SUM else loss


def _share(grad: jax.Array, size: int, reduction: int) -> jax.Array:
    """The gradient that reaches each element of the unreduced loss."""
    return grad / jnp.asarray(size, grad.dtype) if reduction == MEAN and size else grad


# ------------------------------------------------------------------- negative log likelihood


def _class_axis(x: jax.Array) -> int:
    return 0 if x.ndim == 1 else 1


def _is_target(x: jax.Array, target: jax.Array) -> jax.Array:
    """One-hot ``target`` along the class dim of ``x``. Comparing with an iota fuses, and
    partitions over a sharded class dim, where a gather or scatter would not."""
    axis = _class_axis(x)
    target = narrow(target, x.shape[axis])
    classes = jax.lax.broadcasted_iota(target.dtype, x.shape, axis)
    return classes == jnp.expand_dims(target, axis)


def _target_weights(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, ignore_index: int
) -> jax.Array:
    valid = target != ignore_index
    if weight is None:
        return valid.astype(x.dtype)
    return jnp.where(valid, weight.astype(x.dtype)[jnp.where(valid, target, 0)], 0)


@lowers("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(x, target, weight, reduction, ignore_index):
    (x,) = promote_for_math(x)
    target = target.reshape([n for a, n in enumerate(x.shape) if a != _class_axis(x)])
    # Selected, not multiplied by 0 and 1: log-probabilities may be -inf.
    picked = jnp.sum(jnp.where(_is_target(x, target), x, 0), axis=_class_axis(x))
    weights = _target_weights(x, target, weight, ignore_index)
    loss = jnp.where(target == ignore_index, 0, -weights * picked)
    total_weight = jnp.sum(weights)
    if reduction == NONE:
        # Unused by the backward; zero unless there is no batch dim, as torch has it.
        return loss, total_weight if x.ndim == 1 else jnp.zeros((), x.dtype)
    loss = jnp.sum(loss)
    return (loss / total_weight if reduction == MEAN else loss), total_weight


@lowers("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(grad, x, target, weight, reduction, ignore_index, total_weight):
    grad, x, total_weight = promote_for_math(grad, x, total_weight)
    axis = _class_axis(x)
    target = target.reshape([n for a, n in enumerate(x.shape) if a != axis])
    per_target = -_target_weights(x, target, weight, ignore_index) * (
        grad.reshape(target.shape) if reduction == NONE else grad
    )
    if reduction == MEAN:
        per_target = per_target / total_weight
    chosen = _is_target(x, target) & jnp.expand_dims(target != ignore_index, axis)
    return jnp.where(chosen, jnp.expand_dims(per_target, axis), 0)


# ------------------------------------------------------- losses of the elementwise difference


def _difference_loss(name: str, loss: Callable, slope: Callable, **defaults: float) -> None:
    """Register ``reduce(loss(x - y, *options))`` and its backward: ``grad * slope(x - y)``."""

    @lowers(name, symbolic_floats=True)
    def forward(x, y, reduction=MEAN, *options):
        x, y = promote_for_math(x, y)
        return _reduce(loss(x - y, *(options or defaults.values())), reduction)

    @lowers(f"{name}_backward", symbolic_floats=True)
    def backward(grad, x, y, reduction, *options):
        grad, x, y = promote_for_math(grad, x, y)
        difference = x - y
        share = _share(grad, difference.size, reduction)
        return slope(difference, *(options or defaults.values())) * share


def _smooth_l1(d: jax.Array, beta: float) -> jax.Array:
    size = jnp.abs(d)
    width = 1.0 if is_exactly(beta, 0) else beta
    return jnp.where(size < beta, 0.5 * d * d / width, size - 0.5 * beta)


def _smooth_l1_slope(d: jax.Array, beta: float) -> jax.Array:
    width = 1.0 if is_exactly(beta, 0) else beta
    return jnp.where(jnp.abs(d) < beta, d / width, jnp.sign(d))


def _huber(d: jax.Array, delta: float) -> jax.Array:
    size = jnp.abs(d)
    return jnp.where(size <= delta, 0.5 * d * d, delta * (size - 0.5 * delta))


_difference_loss("mse_loss", jnp.square, lambda d: 2 * d)
_difference_loss(
    "smooth_l1_loss",
    _smooth_l1,
    _smooth_l1_slope,
    beta=1.0,
)
_difference_loss("huber_loss", _huber, lambda d, delta: jnp.clip(d, -delta, delta), delta=1.0)


# ------------------------------------------------------------------------------ binary losses


@lowers("binary_cross_entropy")
def binary_cross_entropy(x, y, weight=None, reduction=MEAN):
    x, y = promote_for_math(x, y)
    loss = (y - 1) * jnp.maximum(jnp.log1p(-x), -100) - y * jnp.maximum(jnp.log(x), -100)
    return _reduce(loss if weight is None else loss * weight, reduction)


@lowers("binary_cross_entropy_backward")
def binary_cross_entropy_backward(grad, x, y, weight=None, reduction=MEAN):
    grad, x, y = promote_for_math(grad, x, y)
    result = _share(grad, x.size, reduction) * (x - y) / jnp.maximum((1 - x) * x, 1e-12)
    return result if weight is None else result * weight


@lowers("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(x, y, weight=None, pos_weight=None, reduction=MEAN):
    x, y = promote_for_math(x, y)
    softplus_neg = jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(-x, 0)
    if pos_weight is not None:
        softplus_neg = ((pos_weight - 1) * y + 1) * softplus_neg
    loss = (1 - y) * x + softplus_neg
    return _reduce(loss if weight is None else loss * weight, reduction)


@lowers("soft_margin_loss")
def soft_margin_loss(x, y, reduction=MEAN):
    x, y = promote_for_math(x, y)
    return _reduce(jnp.log1p(jnp.exp(-x * y)), reduction)


@lowers("soft_margin_loss_backward")
def soft_margin_loss_backward(grad, x, y, reduction):
    grad, x, y = promote_for_math(grad, x, y)
    return -y * jax.lax.logistic(-x * y) * _share(grad, x.size, reduction)


# ------------------------------------------------------------------------ multi-class margins


def _positive(x: jax.Array) -> jax.Array:
    """``max(0, x)``, with torch's gradient: 0 at 0."""
    return jnp.where(x > 0, x, 0)


@meta_of("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def _(grad, x, *rest, **options):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _multi_margin(x, target, p, margin, weight, reduction):
    """Per sample: mean over the other classes of ``w * max(0, margin - x[target] + x)^p``."""
    (x,) = promote_for_math(x)
    classes = jnp.atleast_2d(x)
    target = target.reshape(-1)
    is_target = _is_target(classes, target)
    own = jnp.sum(jnp.where(is_target, classes, 0), axis=1, keepdims=True)
    violation = _positive(margin - own + classes)
    violation = violation if p == 1 else violation * violation
    if weight is not None:
        violation = violation * weight[target][:, None]
    loss = jnp.sum(jnp.where(is_target, 0, violation), axis=1) / classes.shape[1]
    return _reduce(loss if x.ndim == 2 else loss[0], reduction)


# One sample's loss has no dims; torch's meta kernels give it one.
@meta_of("multi_margin_loss")
def _(x, target, p=1, margin=1, weight=None, reduction=MEAN):
    out = torch.ops.aten.multi_margin_loss(x, target, p, margin, weight, reduction)
    return out if x.ndim == 2 else out.new_empty(())


@meta_of("multilabel_margin_loss_forward")
def _(x, target, reduction):
    out, is_target = torch.ops.aten.multilabel_margin_loss_forward(x, target, reduction)
    return (out if x.ndim == 2 else out.new_empty(())), is_target


@lowers("multi_margin_loss", static_scalars=lambda name, value: name == "p")
def multi_margin_loss(x, target, p=1, margin=1, weight=None, reduction=MEAN):
    return _multi_margin(x, target, p, margin, weight, reduction)


@lowers("multi_margin_loss_backward", static_scalars=lambda name, value: name == "p")
def multi_margin_loss_backward(grad, x, target, p, margin, weight=None, reduction=MEAN):
    (x,) = promote_for_math(x)
    loss, pullback = jax.vjp(lambda v: _multi_margin(v, target, p, margin, weight, reduction), x)
    return pullback(grad.astype(loss.dtype).reshape(loss.shape))[0]


def _multilabel_targets(x: jax.Array, target: jax.Array) -> jax.Array:
    """Which classes are labels: those in ``target`` before its first -1."""
    listed = jnp.cumprod(target >= 0, axis=-1).astype(np.bool_)
    classes = jnp.arange(x.shape[-1], dtype=target.dtype)
    return jnp.any((target[..., None] == classes) & listed[..., None], axis=-2)


def _multilabel_margin(x, target, is_target, reduction):
    """Per sample: sum over labels ``i`` and other classes ``j`` of ``max(0, 1 - x_i + x_j)``,
    over the number of classes. A label listed twice counts twice."""
    listed = jnp.cumprod(target >= 0, axis=-1).astype(np.bool_)
    # Not a gather: its transpose is a scatter, which XLA partitions wrongly (scatter.py).
    chosen = target[..., :, None] == jnp.arange(x.shape[-1], dtype=target.dtype)
    own = jnp.sum(jnp.where(chosen, x[..., None, :], 0), axis=-1)
    violation = _positive(1 - own[..., :, None] + x[..., None, :])
    counted = listed[..., :, None] & ~is_target[..., None, :]
    loss = jnp.sum(jnp.where(counted, violation, 0), axis=(-2, -1)) / x.shape[-1]
    return _reduce(loss, reduction)


@lowers("multilabel_margin_loss_forward")
def multilabel_margin_loss(x, target, reduction):
    (x,) = promote_for_math(x)
    classes = jnp.atleast_1d(x)
    target = target.reshape(classes.shape)
    is_target = _multilabel_targets(classes, target)
    loss = _multilabel_margin(classes, target, is_target, reduction)
    return loss, is_target.reshape(x.shape)


@lowers("multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(grad, x, target, reduction, is_target):
    (x,) = promote_for_math(x)
    classes = jnp.atleast_1d(x)
    target, is_target = target.reshape(classes.shape), is_target.reshape(classes.shape) != 0
    loss, pullback = jax.vjp(lambda v: _multilabel_margin(v, target, is_target, reduction), classes)
    return pullback(grad.astype(loss.dtype).reshape(loss.shape))[0].reshape(x.shape)
