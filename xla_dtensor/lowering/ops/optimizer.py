"""Fused optimizer steps and gradient scaling over lists of tensors.

The hyperparameters may be traced numbers (a compiled step feeds them as inputs), so nothing here
branches on their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering.ops.for_each import for_each, once_for_each
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers

Tensors = Sequence[jax.Array]


def _bias_correction(beta: Any, step: jax.Array, dtype: Any) -> jax.Array:
    """``1 - beta**step``, in a form that keeps its digits in float32 where beta is near 1."""
    if isinstance(beta, float) and beta > 0:
        log_beta: Any = math.log(beta)
    else:
        log_beta = jnp.log(jnp.asarray(beta, np.float64))
    return -jnp.expm1(step.astype(dtype) * jnp.asarray(log_beta, dtype))


def _fused(
    update: Callable[..., Sequence[jax.Array]],
    params: Tensors,
    grads: Tensors,
    states: Sequence[Tensors],
    maximize: bool,
    grad_scale: jax.Array | None,
    found_inf: jax.Array | None,
    numbers: tuple[Any, ...],
    own_numbers: Sequence[tuple[Any, ...]] | None = None,
    key: Hashable = None,
) -> tuple[list[jax.Array], ...]:
    """``update(numbers, param, grad, *state)`` for each parameter: new parameters, unscaled
    gradients, new states. With ``found_inf`` set, everything stays as it is.

    Of parameters alike (shape, dtype) it is traced, and lowered, once.

    Args:
        numbers: for all parameters.
        own_numbers: further ones for each parameter; traced.
        key: what decides, besides all this, what ``update`` computes, if it is always the same.
    """
    # Arrays among the numbers are arguments: a call would have constants of its own for Python's.
    traced = [x for x in numbers if isinstance(x, jax.Array)]
    whole = [x for x in (grad_scale, found_inf) if x is not None]
    own = own_numbers or [()] * len(params)
    # Those of all parameters, mostly, as their step counts are one array.
    common = own[0] if own and all(_are_same(values, own[0]) for values in own) else ()

    def one(row: Tensors, shared: Tensors) -> list[jax.Array]:
        given, own_given = iter(shared), row[width:] or shared[len(shared) - len(common) :]
        all_numbers = [next(given) if isinstance(x, jax.Array) else x for x in numbers]
        scale = None if grad_scale is None else next(given)
        overflow = None if found_inf is None else next(given)
        old = row[:width]
        # Parameters may be narrower than their states: compute in the widest.
        dtype = math_dtype(jnp.result_type(*old))
        param, wide_grad, *wide_states = (v.astype(dtype) for v in old)
        if scale is not None:
            wide_grad = wide_grad / scale.astype(dtype)
        new_param, *new_states = update(
            (*all_numbers, *own_given), param, -wide_grad if maximize else wide_grad, *wide_states
        )
        new = [
            v.astype(o.dtype) for v, o in zip((new_param, wide_grad, *new_states), old, strict=True)
        ]
        if overflow is not None:
            none = overflow.reshape(()) != 0
            new = [jnp.where(none, o, n) for o, n in zip(old, new, strict=True)]
        return new

    lists = [params, grads, *(state for state in states if state)]
    width = len(lists)
    rows = [list(row) for row in zip(*lists, strict=True)]
    if not common:
        rows = [[*row, *values] for row, values in zip(rows, own, strict=True)]
    if key is not None:
        kinds = [None if isinstance(x, jax.Array) else (type(x), repr(x)) for x in numbers]
        flags = maximize, grad_scale is None, found_inf is None, len(common)
        key = "update", key, width, *kinds, *flags
    columns = for_each(one, rows, [*traced, *whole, *common], key)
    found = iter([list(column) for column in zip(*columns, strict=True)] or [[], []])
    return next(found), next(found), *(next(found, []) if state else [] for state in states)


def _are_same(values: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(values, others, strict=True))


def _adam(decoupled: bool) -> Callable[..., Any]:
    """Adam, or with ``decoupled`` weight decay AdamW."""

    def update(numbers, param, grad, average, square, *largest):
        lr, beta1, beta2, weight_decay, eps, correction1, correction2 = numbers
        rate = jnp.asarray(lr, param.dtype)
        if decoupled:
            param = param - rate * weight_decay * param
        else:
            grad = grad + weight_decay * param
        average = average + (1 - beta1) * (grad - average)
        square = beta2 * square + (1 - beta2) * grad * grad
        largest = tuple(jnp.maximum(v, square) for v in largest)
        denominator = jnp.sqrt(largest[0] if largest else square)
        denominator = denominator / correction2.astype(param.dtype) + eps
        size = rate / correction1.astype(param.dtype)
        return param - size * average / denominator, average, square, *largest

    def step(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        *,
        lr,
        beta1,
        beta2,
        weight_decay,
        eps,
        amsgrad,
        maximize,
        grad_scale=None,
        found_inf=None,
    ):
        wide = np.float64 if any(x.dtype == np.float64 for x in params) else np.float32
        corrections = once_for_each(
            lambda count: (
                _bias_correction(beta1, count, wide),
                jnp.sqrt(_bias_correction(beta2, count, wide)),
            ),
            state_steps,
        )
        return _fused(
            update,
            params,
            grads,
            (exp_avgs, exp_avg_sqs, max_exp_avg_sqs if amsgrad else ()),
            maximize,
            grad_scale,
            found_inf,
            (lr, beta1, beta2, weight_decay, eps),
            corrections,
            ("Adam", decoupled),
        )

    return step


lowers("_fused_adam.default", "_fused_adam.tensor_lr", traced_floats=True)(_adam(decoupled=False))
lowers("_fused_adamw.default", "_fused_adamw.tensor_lr", traced_floats=True)(_adam(decoupled=True))


@lowers("_fused_sgd.default", "_fused_sgd.tensor_lr", traced_floats=True)
def fused_sgd(
    params,
    grads,
    momentum_buffer_list,
    *,
    weight_decay,
    momentum,
    lr,
    dampening,
    nesterov,
    maximize,
    is_first_step,
    grad_scale=None,
    found_inf=None,
):
    def update(numbers, param, grad, *buffers):
        weight_decay, momentum, lr, dampening = numbers
        grad = grad + weight_decay * param
        if buffers:
            buffer = grad if is_first_step else momentum * buffers[0] + (1 - dampening) * grad
            buffers = (buffer,)
            grad = grad + momentum * buffer if nesterov else buffer
        return param - jnp.asarray(lr, param.dtype) * grad, *buffers

    numbers = (weight_decay, momentum, lr, dampening)
    states = (momentum_buffer_list,)
    return _fused(update, params, grads, states, maximize, grad_scale, found_inf, numbers)


def _adagrad(
    params,
    grads,
    state_sums,
    state_steps,
    *,
    lr,
    lr_decay,
    weight_decay,
    eps,
    maximize,
    grad_scale=None,
    found_inf=None,
):
    def update(numbers, param, grad, total):
        lr, lr_decay, weight_decay, eps, count = numbers
        grad = grad + weight_decay * param
        total = total + grad * grad
        rate = jnp.asarray(lr, param.dtype) / (1 + (count.astype(param.dtype) - 1) * lr_decay)
        return param - rate * grad / (jnp.sqrt(total) + eps), total

    numbers = (lr, lr_decay, weight_decay, eps)
    own = [(step,) for step in state_steps]
    states = (state_sums,)
    return _fused(update, params, grads, states, maximize, grad_scale, found_inf, numbers, own)


lowers("_fused_adagrad.tensor_lr", traced_floats=True)(_adagrad)


@lowers("_fused_adagrad.default", traced_floats=True)
def fused_adagrad(params, grads, state_sums, state_steps, **options):
    """This overload returns the step counts too, which the optimizer has already advanced."""
    return *_adagrad(params, grads, state_sums, state_steps, **options), list(state_steps)


# ---------------------------------------------------------------------------- gradient scaling


@lowers("_amp_foreach_non_finite_check_and_unscale")
def unscale(grads, found_inf, inv_scale):
    for grad in grads:
        found_inf = jnp.maximum(found_inf, jnp.any(~jnp.isfinite(grad)).astype(found_inf.dtype))
    scaled = [(g.astype(math_dtype(g.dtype)) * inv_scale).astype(g.dtype) for g in grads]
    return scaled, found_inf


@lowers("_amp_update_scale")
def update_scale(
    scale, growth_tracker, found_inf, scale_growth_factor, scale_backoff_factor, growth_interval
):
    overflow = found_inf != 0
    grown = scale * scale_growth_factor
    due = growth_tracker + 1 == growth_interval
    raised = jnp.where(due & jnp.isfinite(grown), grown, scale)
    return (
        jnp.where(overflow, scale * scale_backoff_factor, raised),
        jnp.where(overflow | due, 0, growth_tracker + 1),
    )
