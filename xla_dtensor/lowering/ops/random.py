"""Random numbers; each lowering takes a JAX key first.

With JAX's default (partitionable) generator a value depends on the key and its logical position
alone, never on the sharding.

Numbers are torch's in distribution, not in value: torch's generators are sequential per device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.base.random import threefry
from xla_dtensor.lowering.context import here
from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.ops.factory import dtype_like, factory_dtype
from xla_dtensor.lowering.partitioned.per_slice import per_slice
from xla_dtensor.lowering.promotion import is_exactly
from xla_dtensor.lowering.registry import lowers
from xla_dtensor.lowering.workarounds import NORMAL_IN_DOUBLE

Shape = Sequence[int]


def _float(dtype: np.dtype) -> np.dtype:
    """Where samples of ``dtype`` are computed: at least single precision."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.dtype(np.float32) if dtype.itemsize < 4 else dtype
    return np.dtype(np.float32)


def _quick(key: jax.Array) -> jax.Array:
    """``key`` for the same numbers, computed as XLA's CPU backend does it best."""
    if here().platform != "cpu":
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=threefry.written_out())


def _uniform(key: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Uniform in [0, 1); both parts of a complex number are."""
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        real, imag = jax.random.uniform(_quick(key), (2, *shape), part)
        return lax.complex(real, imag)
    # Sampled in the target dtype: rounding a single-precision sample could give 1.
    return jax.random.uniform(_quick(key), tuple(shape), dtype)


def _normal(key: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    work = _float(dtype)
    if work != np.float32:
        return jax.random.normal(_quick(key), tuple(shape), work).astype(dtype)
    # Not -1, whose inverse error function is minus infinity.
    low = np.nextafter(np.float32(-1), np.float32(0))
    uniform = jax.random.uniform(_quick(key), tuple(shape), work, minval=low, maxval=1)

    def double(u: jax.Array) -> jax.Array:
        return (np.sqrt(2) * lax.erf_inv(u.astype(np.float64))).astype(np.float32)

    def single(u: jax.Array) -> jax.Array:
        return np.float32(np.sqrt(2)) * lax.erf_inv(u)

    return NORMAL_IN_DOUBLE.choose(double, single, uniform).astype(dtype)


def _integers(key: jax.Array, shape: Shape, low: Any, span: Any) -> jax.Array:
    """Integers in [low, low + span), from 32 bits each where those suffice, as in torch.
    A Python ``span`` may be 2**64: all of int64."""
    if isinstance(span, int) and span <= 2**32:
        bits = jax.random.bits(_quick(key), tuple(shape), np.uint32)
        offset = (bits if span == 2**32 else bits % np.uint32(span)).astype(np.int64)
    else:
        bits = jax.random.bits(_quick(key), tuple(shape), np.uint64)
        whole = isinstance(span, int) and span == 2**64
        offset = (bits if whole else bits % jnp.asarray(span, np.uint64)).astype(np.int64)
    return offset + low


# Factories -----------------------------------------------------------------------------------


@lowers("rand", "rand.generator", random=True)
def rand(key: jax.Array, size: Shape, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _uniform(key, size, factory_dtype(dtype))


@lowers("randn", "randn.generator", random=True)
def randn(key: jax.Array, size: Shape, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _normal(key, size, factory_dtype(dtype))


@lowers("rand_like", "rand_like.generator", random=True)
def rand_like(key: jax.Array, x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _uniform(key, x.shape, dtype_like(x, dtype))


@lowers("randn_like", "randn_like.generator", random=True)
def randn_like(key: jax.Array, x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _normal(key, x.shape, dtype_like(x, dtype))


@lowers("randint", "randint.generator", random=True)
def randint(
    key: jax.Array, high: int, size: Shape, *, dtype: torch.dtype | None = torch.int64
) -> jax.Array:
    return randint_low(key, 0, high, size, dtype=dtype)


@lowers("randint.low", "randint.low_generator", random=True)
def randint_low(
    key: jax.Array, low: int, high: int, size: Shape, *, dtype: torch.dtype | None = torch.int64
) -> jax.Array:
    return _integers(key, size, low, high - low).astype(to_jax_dtype(dtype or torch.int64))


@lowers("randint_like", "randint_like.generator", random=True)
def randint_like(
    key: jax.Array, x: jax.Array, high: int, *, dtype: torch.dtype | None = None
) -> jax.Array:
    return _integers(key, x.shape, 0, high).astype(dtype_like(x, dtype))


@lowers("randint_like.Tensor", "randint_like.Tensor_generator", random=True)
def randint_like_tensor(
    key: jax.Array, x: jax.Array, high: jax.Array, *, dtype: torch.dtype | None = None
) -> jax.Array:
    return _integers(key, x.shape, 0, high.reshape(())).astype(dtype_like(x, dtype))


@lowers("randint_like.low_dtype", "randint_like.low_generator_dtype", random=True)
def randint_like_low(
    key: jax.Array, x: jax.Array, low: int, high: int, *, dtype: torch.dtype | None = None
) -> jax.Array:
    return _integers(key, x.shape, low, high - low).astype(dtype_like(x, dtype))


@lowers("randperm", "randperm.generator", random=True)
def randperm(key: jax.Array, n: int, *, dtype: torch.dtype | None = torch.int64) -> jax.Array:
    return jax.random.permutation(key, n).astype(to_jax_dtype(dtype or torch.int64))


@lowers("normal.float_float", random=True, symbolic_floats=True)
def normal_float_float(
    key: jax.Array, mean: float, std: float, size: Shape, *, dtype: torch.dtype | None = None
) -> jax.Array:
    target = factory_dtype(dtype)
    return _normal(key, size, _float(target)) * std + mean


# In the shape of a tensor (the functional forms of `uniform_` and its kind) --------------------


@lowers("uniform", random=True)
def uniform(key: jax.Array, x: jax.Array, from_: float = 0.0, to: float = 1.0) -> jax.Array:
    # Both parts of a complex number are between the bounds.
    low = complex(from_, from_) if x.dtype.kind == "c" else from_
    return _uniform(key, x.shape, x.dtype) * x.dtype.type(to - from_) + x.dtype.type(low)


@lowers("normal_functional", random=True, symbolic_floats=True)
def normal(key: jax.Array, x: jax.Array, mean: float = 0.0, std: float = 1.0) -> jax.Array:
    return _normal(key, x.shape, _float(x.dtype)) * std + mean


@lowers("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", random=True)
def normal_around(key: jax.Array, mean: Any, std: Any = 1.0) -> jax.Array:
    operands = [v for v in (mean, std) if hasattr(v, "dtype")]
    shape = np.broadcast_shapes(*(v.shape for v in operands))
    return _normal(key, shape, _float(operands[0].dtype)) * std + mean


@lowers("log_normal", random=True)
def log_normal(key: jax.Array, x: jax.Array, mean: float = 1.0, std: float = 2.0) -> jax.Array:
    return jnp.exp(normal(key, x, mean, std))


@lowers("cauchy", random=True)
def cauchy(key: jax.Array, x: jax.Array, median: float = 0.0, sigma: float = 1.0) -> jax.Array:
    return jax.random.cauchy(_quick(key), x.shape, _float(x.dtype)) * sigma + median


@lowers("exponential", random=True, symbolic_floats=True)
def exponential(key: jax.Array, x: jax.Array, lambd: float = 1.0) -> jax.Array:
    return jax.random.exponential(_quick(key), x.shape, _float(x.dtype)) / lambd


@lowers("geometric", random=True)
def geometric(key: jax.Array, x: jax.Array, p: float) -> jax.Array:
    """How many trials until the first success, 1 at least."""
    if p == 1:
        return jnp.ones_like(x)
    trials = jax.random.exponential(_quick(key), x.shape, _float(x.dtype)) / -math.log1p(-p)
    return jnp.maximum(jnp.ceil(trials), 1)


def _largest_integer(dtype: np.dtype) -> int:
    """The largest integer that `random_` draws for ``dtype``."""
    if dtype.kind == "b":
        return 1
    if jnp.issubdtype(dtype, jnp.floating):
        return 2 ** (jnp.finfo(dtype).nmant + 1)
    return int(jnp.iinfo(dtype).max)


@lowers("random", random=True)
def random(key: jax.Array, x: jax.Array) -> jax.Array:
    return _integers(key, x.shape, 0, _largest_integer(x.dtype) + 1)


@lowers("random.to", random=True)
def random_to(key: jax.Array, x: jax.Array, to: int) -> jax.Array:
    return _integers(key, x.shape, 0, to)


@lowers("random.from", random=True)
def random_from(key: jax.Array, x: jax.Array, from_: int, to: int | None) -> jax.Array:
    end = _largest_integer(x.dtype) + 1 if to is None else to
    return _integers(key, x.shape, from_, end - from_)


# With probabilities --------------------------------------------------------------------------


@lowers("bernoulli", random=True)
def bernoulli(key: jax.Array, p: jax.Array) -> jax.Array:
    return jax.random.bernoulli(_quick(key), p.astype(_float(p.dtype))).astype(p.dtype)


@lowers("bernoulli.p", "bernoulli.Tensor", random=True, symbolic_floats=True)
def bernoulli_p(key: jax.Array, x: jax.Array, p: Any = 0.5) -> jax.Array:
    p = jnp.broadcast_to(jnp.asarray(p), x.shape)
    return jax.random.bernoulli(_quick(key), p.astype(_float(p.dtype))).astype(x.dtype)


@lowers("poisson", random=True)
def poisson(key: jax.Array, x: jax.Array) -> jax.Array:
    return jax.random.poisson(key, x.astype(_float(x.dtype)), dtype=np.int64).astype(x.dtype)


@meta_of("binomial")
def binomial_shape(count: torch.Tensor, prob: torch.Tensor, generator: Any = None) -> torch.Tensor:
    return count.new_empty(torch.broadcast_shapes(count.shape, prob.shape))


@lowers("binomial", random=True)
def binomial(key: jax.Array, count: jax.Array, prob: jax.Array) -> jax.Array:
    wide = _float(count.dtype)
    return jax.random.binomial(key, count.astype(wide), prob.astype(wide), dtype=wide)


@lowers("_standard_gamma", random=True)
def standard_gamma(key: jax.Array, x: jax.Array) -> jax.Array:
    return jax.random.gamma(key, x.astype(_float(x.dtype)), dtype=_float(x.dtype))


@lowers("_standard_gamma_grad")
def standard_gamma_grad(x: jax.Array, output: jax.Array) -> jax.Array:
    wide = _float(x.dtype)
    return lax.random_gamma_grad(x.astype(wide), output.astype(wide))


@meta_of("_sample_dirichlet")
def dirichlet_shape(x: torch.Tensor, generator: Any = None) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@lowers("_sample_dirichlet", random=True)
def sample_dirichlet(key: jax.Array, x: jax.Array) -> jax.Array:
    return jax.random.dirichlet(key, x.astype(_float(x.dtype)), dtype=_float(x.dtype))


@lowers("multinomial", random=True)
def multinomial(
    key: jax.Array, x: jax.Array, num_samples: int, replacement: bool = False
) -> jax.Array:
    logits = jnp.log(x.astype(_float(x.dtype)))
    if not replacement and num_samples > x.shape[-1]:
        raise RuntimeError(
            f"cannot sample n_sample > prob_dist.size(-1) samples without replacement: "
            f"{num_samples} of {x.shape[-1]}"
        )
    if not replacement:
        # The Gumbel-max trick: the k largest perturbed logits are k draws without replacement.
        gumbel = jax.random.gumbel(_quick(key), x.shape, logits.dtype)
        if num_samples == 1:  # no part of a sharded vocabulary is gathered for it
            return jnp.argmax(logits + gumbel, axis=-1, keepdims=True).astype(np.int64)
        largest = lambda keys: lax.top_k(keys, num_samples)[1]
        drawn = per_slice(largest, x.ndim - 1, logits + gumbel)
        return drawn.astype(np.int64)
    shape = (num_samples, *x.shape[:-1])
    drawn = jax.random.categorical(key, logits, axis=-1, shape=shape)
    return jnp.moveaxis(drawn, 0, -1).astype(np.int64)


# Dropout -------------------------------------------------------------------------------------


@lowers("native_dropout", random=True, symbolic_floats=True)
def native_dropout(
    key: jax.Array, x: jax.Array, p: float, train: bool | None
) -> tuple[jax.Array, jax.Array]:
    if train is False or is_exactly(p, 0):
        return x, jnp.ones(x.shape, bool)
    if is_exactly(p, 1):
        return jnp.zeros_like(x), jnp.zeros(x.shape, bool)
    mask = jax.random.bernoulli(_quick(key), jnp.asarray(1 - p, np.float32), x.shape)
    scaled = x * jnp.asarray(1 / (1 - p), x.dtype)
    return jnp.where(mask, scaled, jnp.zeros((), x.dtype)), mask


@lowers("native_dropout_backward", symbolic_floats=True)
def native_dropout_backward(grad: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    # torch's kernel multiplies a bool or integer gradient by the number it was given.
    inexact = jnp.issubdtype(grad.dtype, jnp.inexact)
    number = jnp.asarray(scale, grad.dtype) if inexact else scale
    return grad * (mask.astype(grad.dtype) * number)


@lowers("dropout", random=True, symbolic_floats=True)
def dropout(key: jax.Array, x: jax.Array, p: float, train: bool) -> jax.Array:
    return native_dropout(key, x, p, train)[0]


@lowers("_fused_dropout", random=True)
def fused_dropout(key: jax.Array, x: jax.Array, p: float) -> tuple[jax.Array, jax.Array]:
    """Here ``p`` is the probability to keep an element."""
    out, mask = native_dropout(key, x, 1 - p, True)
    return out, mask.astype(np.uint8)


@lowers("rrelu_with_noise_functional", random=True)
def rrelu_with_noise(
    key: jax.Array,
    x: jax.Array,
    noise: jax.Array,
    lower: Any = 1 / 8,
    upper: Any = 1 / 3,
    training: bool = False,
) -> tuple[jax.Array, jax.Array]:
    if not training:
        slope = jnp.asarray((lower + upper) / 2).astype(x.dtype)
        return jnp.where(x <= 0, x * slope, x), noise
    drawn = _uniform(key, x.shape, _float(x.dtype)) * (upper - lower) + lower
    noise = jnp.where(x <= 0, drawn.astype(x.dtype), jnp.ones((), x.dtype))
    return x * noise, noise
