"""Reductions and scans over tensor dims."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.lowering.dims import axes_of
from xla_dtensor.lowering.ops.pointwise import logaddexp
from xla_dtensor.lowering.partitioned.extremes import greatest, least
from xla_dtensor.lowering.partitioned.scans import Arrays, Combine, added, scan
from xla_dtensor.lowering.promotion import (
    cast,
    float_dtype,
    is_complex,
    is_integral,
    math_dtype,
    promote_to_float,
)
from xla_dtensor.lowering.registry import lowers
from xla_dtensor.lowering.workarounds import BITS_OF_DOUBLES


def _count(x: jax.Array, axes: Sequence[int]) -> int:
    return int(np.prod([x.shape[a] for a in axes], dtype=np.int64))


def _accumulator(x: jax.Array, dtype: Any) -> jax.Array:
    """``x`` in the dtype in which torch sums it: int64 for integers, float32 for halves."""
    if dtype is not None:
        target = to_jax_dtype(dtype)
    else:
        target = np.dtype(np.int64) if is_integral(x) else x.dtype
    return cast(x, math_dtype(target))


@lowers("sum.default", "sum.dim_IntList")
def sum_(x, dim=None, keepdim=False, *, dtype=None):
    return jnp.sum(_accumulator(x, dtype), axes_of(dim, x.ndim), keepdims=keepdim)


@lowers("nansum")
def nansum(x, dim=None, keepdim=False, *, dtype=None):
    if not is_integral(x):
        x = jnp.where(jnp.isnan(x), 0, x)
    return sum_(x, dim, keepdim, dtype=dtype)


@lowers("mean.default", "mean.dim")
def mean(x, dim=None, keepdim=False, *, dtype=None):
    axes = axes_of(dim, x.ndim)
    x = _accumulator(x, dtype)
    return jnp.sum(x, axes, keepdims=keepdim) / jnp.asarray(_count(x, axes), x.dtype)


@lowers("prod.default", "prod.dim_int")
def prod(x, dim=None, keepdim=False, *, dtype=None):
    return jnp.prod(_accumulator(x, dtype), axes_of(dim, x.ndim), keepdims=keepdim)


@lowers("trace")
def trace(x):
    return jnp.trace(_accumulator(x, None))


@lowers("count_nonzero", "count_nonzero.dim_IntList")
def count_nonzero(x, dim=None):
    return jnp.sum(x != 0, axes_of(dim, x.ndim), dtype=np.int64)


def _truth(reduce: Callable, empty_is_all: bool) -> Callable:
    def found(x, dim=None, keepdim=False):
        axes = axes_of(dim, x.ndim, empty_is_all=empty_is_all)
        return reduce(x != 0, axes, keepdims=keepdim)

    return found


for _name, _reduce in (("any", jnp.any), ("all", jnp.all)):
    lowers(f"{_name}.default", f"{_name}.dim")(_truth(_reduce, empty_is_all=True))
    lowers(f"{_name}.dims")(_truth(_reduce, empty_is_all=False))


@lowers("hash_tensor")
def hash_tensor(x, dim=(), *, keepdim=False, mode=0):
    """The exclusive or of the elements' bits as 64-bit numbers, bit by bit: XLA has no such
    collective."""
    axes = axes_of(dim, x.ndim)
    text = (
        f"aten::hash_tensor of a tensor of shape {list(x.shape)}: its 64-bit arithmetic is not on "
        "this backend; move the tensor to the CPU: torch.hash_tensor(x.full_tensor().cpu())"
    )
    return BITS_OF_DOUBLES.only(text, functools.partial(_hash, axes, keepdim), x)


def _hash(axes, keepdim, x):
    if is_integral(x):
        bits = x.astype(np.uint64 if np.dtype(x.dtype).kind in "bu" else np.int64)
        bits = bits.astype(np.uint64)
    else:
        bits = jax.lax.bitcast_convert_type(x.astype(np.float64), np.uint64)
    one = np.uint64(1)
    parities = (
        (jnp.sum((bits >> place) & one, axes, keepdims=keepdim) & one) << place
        for place in map(np.uint64, range(64))
    )
    return functools.reduce(jnp.bitwise_or, parities)


# ------------------------------------------------------------------------------------ extrema


@lowers("amax", "max.default")
def amax(x, dim=(), keepdim=False):
    return greatest(x, axes_of(dim, x.ndim), keepdim)


@lowers("amin", "min.default")
def amin(x, dim=(), keepdim=False):
    return least(x, axes_of(dim, x.ndim), keepdim)


@lowers("aminmax")
def aminmax(x, *, dim=None, keepdim=False):
    return amin(x, dim, keepdim), amax(x, dim, keepdim)


@lowers("argmax")
def argmax(x, dim=None, keepdim=False, *, search: Callable = jax.lax.argmax):
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    if x.ndim == 0:
        return jnp.zeros((), np.int64)
    if np.iscomplexobj(x) or x.size >= 2**31:
        return getattr(jnp, search.__name__)(x, axis=dim, keepdims=keepdim)
    # Positions of 32 bits, which JAX also lowers where its 64-bit types are off.
    flat, axis = (x.reshape(-1), 0) if dim is None else (x, dim % x.ndim)
    found = search(flat, axis, np.int32).astype(np.int64)
    if keepdim:
        found = found.reshape((1,) * x.ndim) if dim is None else jnp.expand_dims(found, axis)
    return found


@lowers("argmin")
def argmin(x, dim=None, keepdim=False):
    return argmax(x, dim, keepdim, search=jax.lax.argmin)


@lowers("max.dim")
def max_dim(x, dim, keepdim=False):
    return amax(x, dim, keepdim), argmax(x, dim, keepdim)


@lowers("min.dim")
def min_dim(x, dim, keepdim=False):
    return amin(x, dim, keepdim), argmin(x, dim, keepdim)


# --------------------------------------------------------------------------- moments and norms


@lowers("var_mean.correction")
def var_mean(x, dim=None, *, correction=None, keepdim=False):
    axes = axes_of(dim, x.ndim)
    average = mean(x, axes, True) if axes else _accumulator(x, None)
    centered = _accumulator(x, None) - average
    squares = centered.real**2 + centered.imag**2 if is_complex(x) else centered**2
    degrees = jnp.maximum(_count(x, axes) - (1 if correction is None else correction), 0)
    variance = jnp.sum(squares, axes, keepdims=keepdim) / degrees.astype(squares.dtype)
    return variance, average if keepdim else jnp.squeeze(average, axes)


@lowers("var.correction")
def var(x, dim=None, *, correction=None, keepdim=False):
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


@lowers("std_mean.correction")
def std_mean(x, dim=None, *, correction=None, keepdim=False):
    variance, average = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return jnp.sqrt(variance), average


@lowers("std.correction")
def std(x, dim=None, *, correction=None, keepdim=False):
    return std_mean(x, dim, correction=correction, keepdim=keepdim)[0]


@lowers("linalg_vector_norm", static_scalars=True)
def vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    target = float_dtype(x.dtype) if dtype is None else to_jax_dtype(dtype)
    x = cast(x, math_dtype(target))
    options = {"axis": axes_of(dim, x.ndim), "keepdims": keepdim}
    if np.isinf(ord):
        x, axes = jnp.abs(x), options["axis"]
        if x.size == 0 and ord > 0:
            return jnp.max(x, initial=0, **options)
        return greatest(x, axes, keepdim) if ord > 0 else least(x, axes, keepdim)
    total = _power_sum(x, ord, options)
    if ord == 2:
        return jnp.sqrt(total)
    return total if ord in (0, 1) else total ** (1.0 / ord)


def _power_sum(x, ord, options):
    if ord == 2:
        return jnp.sum(x.real**2 + x.imag**2 if is_complex(x) else x * x, **options)
    x = jnp.abs(x)
    if ord == 0:
        return jnp.sum(x != 0, **options).astype(x.dtype)
    return jnp.sum(x if ord == 1 else x**ord, **options)


@lowers("linalg__powsum", static_scalars=True)
def powsum(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    target = float_dtype(x.dtype) if dtype is None else to_jax_dtype(dtype)
    x = cast(x, math_dtype(target))
    return _power_sum(x, ord, {"axis": axes_of(dim, x.ndim), "keepdims": keepdim})


@lowers("_foreach_powsum.Scalar", static_scalars=True)
def foreach_powsum(xs, ord=2, dtype=None):
    return [powsum(x, ord, dtype=dtype) for x in xs]


@lowers("_foreach_norm.Scalar", static_scalars=True)
def foreach_norm(xs, ord=2, dtype=None):
    return [vector_norm(x, ord, dtype=dtype) for x in xs]


@lowers("norm.Scalar", "norm.ScalarOpt_dtype", static_scalars=True)
def norm_all(x, p=2, *, dtype=None):
    return vector_norm(x, 2 if p is None else p, dtype=dtype)


@lowers("norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", static_scalars=True)
def norm(x, p, dim, keepdim=False, *, dtype=None):
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@lowers("dist", static_scalars=True)
def dist(x, y, p=2):
    return vector_norm(jnp.subtract(*promote_to_float(x, y)), p)


@lowers("renorm", static_scalars=lambda name, value: name == "p")
def renorm(x, p, dim, maxnorm):
    """Slices along ``dim`` whose norm exceeds ``maxnorm``, scaled down to it."""
    others = [d for d in range(x.ndim) if d != dim % x.ndim]
    norms = vector_norm(x, p, others, True)
    scale = jnp.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1)
    return x.astype(math_dtype(x.dtype)) * scale


@lowers("logsumexp")
def logsumexp(x, dim, keepdim=False):
    (x,) = promote_to_float(x)
    axes = axes_of(dim, x.ndim)
    peak = jnp.max(x.real, axes, keepdims=True, initial=-jnp.inf)
    peak = jnp.where(jnp.isfinite(peak), peak, 0)
    total = jnp.log(jnp.sum(jnp.exp(x - peak), axes, keepdims=True)) + peak
    return total if keepdim else jnp.squeeze(total, axes)


# --------------------------------------------------------------------------------------- scans


def _multiplied(earlier: Arrays, later: Arrays) -> Arrays:
    return (earlier[0] * later[0],)


def _logs_of_added(earlier: Arrays, later: Arrays) -> Arrays:
    return (logaddexp(earlier[0], later[0]),)


def _larger(earlier: Arrays, later: Arrays) -> Arrays:
    return _chosen(later[0] >= earlier[0], earlier, later)


def _smaller(earlier: Arrays, later: Arrays) -> Arrays:
    return _chosen(later[0] <= earlier[0], earlier, later)


def _chosen(take: jax.Array, earlier: Arrays, later: Arrays) -> Arrays:
    """Values and indices; the latest index among equals, and NaN beats every number."""
    if not is_integral(later[0]):
        take = jnp.isnan(later[0]) | (~jnp.isnan(earlier[0]) & take)
    return tuple(jnp.where(take, b, a) for a, b in zip(earlier, later, strict=True))


@lowers("cumsum")
def cumsum(x, dim, *, dtype=None):
    return scan(added, [_accumulator(x, dtype)], dim)[0]


@lowers("cumprod")
def cumprod(x, dim, *, dtype=None):
    return scan(_multiplied, [_accumulator(x, dtype)], dim)[0]


@lowers("logcumsumexp")
def logcumsumexp(x, dim):
    (x,) = promote_to_float(x)
    return scan(_logs_of_added, [x], dim)[0]


def _running_extremum(x: jax.Array, dim: int, better: Combine) -> Arrays:
    if x.ndim == 0 or x.size == 0:
        return x, jnp.zeros(x.shape, np.int64)
    index = jax.lax.broadcasted_iota(np.int64, x.shape, dim % x.ndim)
    return scan(better, (x, index), dim)


@lowers("cummax")
def cummax(x, dim):
    return _running_extremum(x, dim, _larger)


@lowers("cummin")
def cummin(x, dim):
    return _running_extremum(x, dim, _smaller)
