"""Horovod's reductions (`Average`, `Sum`, ...): their names, and how a device reduces values."""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp


class ReduceOp(enum.IntEnum):
    """How the ranks' values become one."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    def __repr__(self) -> str:
        return f"horovod.{self.name}"


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def reduction(op: int | None, average: bool | None) -> ReduceOp:
    """The reduction that ``op``, or the deprecated ``average``, means.

    Args:
        op: one of `ReduceOp`; None for `Average`, or what ``average`` says.
        average: True for `Average`, False for `Sum`; deprecated.

    Raises:
        ValueError: both are given, or ``op`` is none.
    """
    if op is not None:
        if average is not None:
            raise ValueError(
                f"op={op!r} and average={average}: give op alone; average is deprecated"
            )
        return ReduceOp(op)
    if average is not None:
        warnings.warn(
            "the argument average is deprecated: give op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=4,
        )
        return Average if average else Sum
    return Average


# --- on a device ---------------------------------------------------------------------------------


def fractional(dtype: Any) -> bool:
    """Whether values of a JAX dtype are no integers."""
    return jnp.issubdtype(dtype, jnp.inexact)


def scaled(value: Any, factor: float) -> Any:
    """``value * factor`` in the value's dtype: integers by way of float64, truncated."""
    if factor == 1.0:
        return value
    if fractional(value.dtype):
        wide = jnp.float32 if value.dtype.itemsize < 4 else value.dtype
        return (value.astype(wide) * jnp.asarray(factor, wide)).astype(value.dtype)
    return (value.astype(jnp.float64) * factor).astype(value.dtype)


def reduced(op: ReduceOp, parts: Any) -> Any:
    """The sum, minimum, ... of values that lie along dim 0; of `Average` the sum."""
    return _REDUCED[op](parts)


def _adasum(values: list[Any]) -> Any:
    """Adasum of a power of two of values: pairs at growing distances, each combined as
    ``(1 - ab / 2aa) a + (1 - ab / 2bb) b`` (Maleki et al., 2020, arXiv:2006.02924, eq. 4), so
    orthogonal ones add up and parallel ones average.

    Args:
        values: NumPy or JAX arrays; dot products are computed in float64.
    """
    if len(values) == 1:
        return values[0]
    pairs = [_adasum_pair(*values[i : i + 2]) for i in range(0, len(values), 2)]
    return _adasum(pairs)


_TINY = math.sqrt(2.2250738585072014e-308)  # a smaller squared norm counts as 0: no division


def _adasum_pair(a: Any, b: Any) -> Any:
    wide_a, wide_b = a.astype(jnp.float64), b.astype(jnp.float64)
    dot, norm_a, norm_b = (wide_a * wide_b).sum(), (wide_a**2).sum(), (wide_b**2).sum()
    of_a = jnp.where(norm_a < _TINY, 1.0, 1 - dot / (2 * jnp.maximum(norm_a, _TINY)))
    of_b = jnp.where(norm_b < _TINY, 1.0, 1 - dot / (2 * jnp.maximum(norm_b, _TINY)))
    return (of_a * wide_a + of_b * wide_b).astype(a.dtype)


_REDUCED: dict[ReduceOp, Callable[[Any], Any]] = {
    ReduceOp.Average: lambda parts: jnp.sum(parts, 0, dtype=parts.dtype),
    ReduceOp.Sum: lambda parts: jnp.sum(parts, 0, dtype=parts.dtype),
    ReduceOp.Min: lambda parts: jnp.min(parts, 0),
    ReduceOp.Max: lambda parts: jnp.max(parts, 0),
    ReduceOp.Product: lambda parts: jnp.prod(parts, 0, dtype=parts.dtype),
    ReduceOp.Adasum: lambda parts: _adasum([parts[i] for i in range(parts.shape[0])]),
}
