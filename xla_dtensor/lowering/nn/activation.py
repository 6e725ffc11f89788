"""Activation functions and their backward overloads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering.ops.selection import clamp
from xla_dtensor.lowering.promotion import promote, promote_for_math
from xla_dtensor.lowering.registry import lowers

_SQRT_HALF = np.sqrt(0.5).item()
_SQRT_2_OVER_PI = np.sqrt(2 / np.pi).item()
_GELU_CUBIC = 0.044715


@lowers("relu")
def relu(x):
    return jnp.maximum(x, 0)


@lowers("threshold")
def threshold(x, threshold, value):
    (x,) = promote(x)
    bound, value = (jnp.asarray(v).astype(x.dtype) for v in (threshold, value))
    return jnp.where(x <= bound, value, x)


@lowers("threshold_backward")
def threshold_backward(grad, x, threshold):
    grad, x = promote(grad, x)
    return jnp.where(x <= jnp.asarray(threshold).astype(x.dtype), 0, grad)


@lowers("gelu")
def gelu(x, *, approximate="none"):
    (x,) = promote_for_math(x)
    if approximate == "tanh":
        return 0.5 * x * (1 + jnp.tanh(_SQRT_2_OVER_PI * (x + _GELU_CUBIC * x**3)))
    return 0.5 * x * (1 + jax.lax.erf(x * _SQRT_HALF))


@lowers("gelu_backward")
def gelu_backward(grad, x, *, approximate="none"):
    grad, x = promote_for_math(grad, x)
    if approximate == "tanh":
        inner = jnp.tanh(_SQRT_2_OVER_PI * (x + _GELU_CUBIC * x**3))
        slope = _SQRT_2_OVER_PI * (1 + 3 * _GELU_CUBIC * x**2)
        return grad * 0.5 * ((1 + inner) + x * (1 - inner * inner) * slope)
    cdf = 0.5 * (1 + jax.lax.erf(x * _SQRT_HALF))
    density = jnp.exp(-0.5 * x * x) * (0.5 * _SQRT_2_OVER_PI)
    return grad * (cdf + x * density)


@lowers("silu")
def silu(x):
    (x,) = promote_for_math(x)
    return x * jax.lax.logistic(x)


@lowers("silu_backward")
def silu_backward(grad, x):
    grad, x = promote_for_math(grad, x)
    sigmoid = jax.lax.logistic(x)
    return grad * jnp.conj(sigmoid * (1 + x * (1 - sigmoid)))


@lowers("sigmoid_backward")
def sigmoid_backward(grad, result):
    grad, result = promote_for_math(grad, result)
    return grad * jnp.conj((1 - result) * result)


@lowers("tanh_backward")
def tanh_backward(grad, result):
    grad, result = promote_for_math(grad, result)
    return grad * jnp.conj(1 - result * result)


@lowers("leaky_relu")
def leaky_relu(x, negative_slope=0.01):
    (x,) = promote_for_math(x)
    return jnp.where(x > 0, x, x * negative_slope)


@lowers("leaky_relu_backward")
def leaky_relu_backward(grad, x, negative_slope, self_is_result):
    grad, x = promote_for_math(grad, x)
    return jnp.where(x > 0, grad, grad * negative_slope)


@lowers("rrelu_with_noise_backward")
def rrelu_backward(grad, x, noise, lower, upper, training, self_is_result):
    if training:
        grad, noise = promote_for_math(grad, noise)
        return grad * noise
    return leaky_relu_backward(grad, x, (lower + upper) / 2, self_is_result)


@lowers("_prelu_kernel")
def prelu(x, weight):
    x, weight = promote_for_math(x, weight)
    return jnp.where(x > 0, x, weight * x)


@lowers("_prelu_kernel_backward")
def prelu_backward(grad, x, weight):
    grad, x, weight = promote_for_math(grad, x, weight)
    return jnp.where(x > 0, grad, weight * grad), jnp.where(x > 0, 0, x * grad)


@lowers("elu")
def elu(x, alpha=1, scale=1, input_scale=1):
    (x,) = promote_for_math(x)
    return jnp.where(x > 0, x * scale, jnp.expm1(x * input_scale) * (alpha * scale))


@lowers("elu_backward")
def elu_backward(grad, alpha, scale, input_scale, is_result, x):
    grad, x = promote_for_math(grad, x)
    if is_result:
        negative = x + alpha * scale
    else:
        negative = alpha * scale * jnp.exp(x * input_scale)
    return grad * jnp.where(x <= 0, input_scale * negative, scale)


@lowers("celu")
def celu(x, alpha=1.0):
    return elu(x, alpha, 1, 1 / alpha)


@lowers("hardtanh")
def hardtanh(x, min_val=-1, max_val=1):
    return clamp(x, *(jnp.asarray(v).astype(x.dtype) for v in (min_val, max_val)))


@lowers("hardtanh_backward")
def hardtanh_backward(grad, x, min_val, max_val):
    grad, x = promote_for_math(grad, x)
    return jnp.where((x <= min_val) | (x >= max_val), 0, grad)


@lowers("hardsigmoid")
def hardsigmoid(x):
    (x,) = promote_for_math(x)
    return jnp.clip(x + 3, 0, 6) / 6


@lowers("hardsigmoid_backward")
def hardsigmoid_backward(grad, x):
    grad, x = promote_for_math(grad, x)
    return jnp.where((x > -3) & (x < 3), grad / 6, 0)


@lowers("hardswish")
def hardswish(x):
    (x,) = promote_for_math(x)
    return x * jnp.clip(x + 3, 0, 6) / 6


@lowers("hardswish_backward")
def hardswish_backward(grad, x):
    grad, x = promote_for_math(grad, x)
    return jnp.where(x <= -3, 0, jnp.where(x < 3, grad * (x / 3 + 0.5), grad))


@lowers("softplus")
def softplus(x, beta=1, threshold=20):
    (x,) = promote_for_math(x)
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(scaled)) / beta)


@lowers("softplus_backward")
def softplus_backward(grad, x, beta, threshold):
    grad, x = promote_for_math(grad, x)
    scaled = x * beta
    return jnp.where(scaled > threshold, grad, grad * jax.lax.logistic(scaled))


@lowers("mish")
def mish(x):
    (x,) = promote_for_math(x)
    return x * jnp.tanh(jnp.logaddexp(x, 0))


@lowers("mish_backward")
def mish_backward(grad, x):
    grad, x = promote_for_math(grad, x)
    inner = jnp.tanh(jnp.logaddexp(x, 0))
    return grad * (inner + x * jax.lax.logistic(x) * (1 - inner * inner))


@lowers("hardshrink")
def hardshrink(x, lambd=0.5):
    return hardshrink_backward(x, x, lambd)


@lowers("hardshrink_backward", "softshrink_backward")
def hardshrink_backward(grad, x, lambd):
    grad, x = promote_for_math(grad, x)
    return jnp.where((x >= -lambd) & (x <= lambd), 0, grad)


@lowers("softshrink")
def softshrink(x, lambd=0.5):
    (x,) = promote_for_math(x)
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0))


@lowers("log_sigmoid_forward")
def log_sigmoid_forward(x):
    (x,) = promote_for_math(x)
    decay = jnp.exp(-jnp.abs(x))
    return jnp.minimum(x, 0) - jnp.log1p(decay), decay


@lowers("log_sigmoid_backward")
def log_sigmoid_backward(grad, x, buffer):
    grad, x = promote_for_math(grad, x)
    return grad * jax.lax.logistic(-x)


@lowers("glu")
def glu(x, dim=-1):
    (x,) = promote_for_math(x)
    value, gate = jnp.split(x, 2, axis=dim)
    return value * jax.lax.logistic(gate)


@lowers("glu_backward")
def glu_backward(grad, x, dim):
    grad, x = promote_for_math(grad, x)
    value, gate = jnp.split(x, 2, axis=dim)
    gate = jax.lax.logistic(gate)
    return jnp.concatenate([grad * gate, grad * value * gate * (1 - gate)], axis=dim)


@lowers("logit", symbolic_floats=True)
def logit(x, eps=None):
    (x,) = promote_for_math(x)
    if np.dtype(x.dtype).kind in "biu":
        x = x.astype(np.float32)
    if eps is not None:
        x = jnp.clip(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))


@lowers("logit_backward", symbolic_floats=True)
def logit_backward(grad, x, eps=None):
    grad, x = promote_for_math(grad, x)
    slope = grad / (x * (1 - x))
    if eps is not None:
        return jnp.where((x < eps) | (x > 1 - eps), 0, slope)
    return jnp.where((x < 0) | (x > 1), jnp.nan, slope)
