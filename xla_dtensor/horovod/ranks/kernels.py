"""Each collective as a JAX function of one device's value, inside of ``jax.shard_map``.

Both ways of launching end here: `per_device` for the devices of one process, and `exchange` for
processes and threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from xla_dtensor.horovod.reductions import ReduceOp

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """What one collective is for a device; equal ones share a compiled program.

    Attributes:
        kind: allreduce, allgather, broadcast, alltoall or reducescatter.
        op: the reduction, of those that reduce.
        prescale, postscale: factors before and after it.
        divisor: what an average divides by; the number of ranks, also of those that have joined.
        root: the position of the broadcast's source in its set.
        sets: None if all devices along the axes are one set; else the members of each set, of equal
            sizes. A device in none of them keeps its value.
    """

    kind: str
    op: ReduceOp = ReduceOp.Sum
    prescale: float = 1.0
    postscale: float = 1.0
    divisor: int = 1
    root: int = 0
    sets: tuple[tuple[int, ...], ...] | None = None

    def on_device(self, value: Any, axes: Axes) -> Any:
        """What the device has afterwards.

        Args:
            value: what it has. Of alltoall and reducescatter dim 0 is the set's size times a piece.
            axes: the mesh axes along which the ranks are, major to minor.
        """
        if not value.size:
            return self._of_nothing(value, axes)
        if self.kind in ("allreduce", "reducescatter"):
            return self._reduced(value, axes)
        if self.sets is None:
            return _WHOLE[self.kind](self, value, axes)
        return self._among_sets(value, axes, _PARTS[self.kind])

    def _reduced(self, value: Any, axes: Axes) -> Any:
        dtype = value.dtype
        scaled = _scale(value, self.prescale)
        if self.op == ReduceOp.Average and not _fractional(dtype):
            scaled = scaled.astype(jnp.int64)
        if dtype == jnp.bool_:
            scaled = scaled.astype(jnp.uint8)
        if self.sets is None:
            total = _WHOLE[self.kind](self, scaled, axes)
        else:
            total = self._among_sets(scaled, axes, _PARTS[self.kind])
        if self.op == ReduceOp.Average:
            total = total // self.divisor if not _fractional(dtype) else total / self.divisor
        if dtype == jnp.bool_:
            total = total != 0
        total = _scale(total.astype(dtype), self.postscale)
        if self.sets is not None and self.kind == "allreduce":
            total = jnp.where(_in_a_set(self.sets, axes), total, value)
        return total

    def _of_nothing(self, value: Any, axes: Axes) -> Any:
        """The result for a value without elements, which XLA's collectives don't take."""
        count = jax.lax.axis_size(axes) if self.sets is None else len(self.sets[0])
        rows = {"allgather": lambda n: n * count, "reducescatter": lambda n: n // count}
        if self.kind not in rows:
            return value
        return jnp.zeros((rows[self.kind](value.shape[0]), *value.shape[1:]), value.dtype)

    def _among_sets(self, value: Any, axes: Axes, take: Callable[..., Any]) -> Any:
        """All devices' values, of which each takes those of its set: sets may be any lists of
        devices, for which XLA has no groups on all platforms."""
        assert self.sets is not None
        position, members = _place(self.sets, axes)
        parts = jax.lax.all_gather(value, axes)[members]
        if self.kind == "broadcast":
            inside = _in_a_set(self.sets, axes)
            return jnp.where(inside, take(self, parts, position), value)
        return take(self, parts, position)


def _place(sets: tuple[tuple[int, ...], ...], axes: Axes) -> tuple[Any, Any]:
    """The device's position in its set, and the set's members; for a device in none those of the
    first, which it doesn't use."""
    me = jax.lax.axis_index(axes)
    table = jnp.array(sets)
    which = jnp.argmax((table == me).any(1))
    members = table[which]
    return jnp.argmax(members == me), members


def _in_a_set(sets: tuple[tuple[int, ...], ...], axes: Axes) -> Any:
    return (jnp.array(sets) == jax.lax.axis_index(axes)).any()


def _fractional(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _scale(value: Any, factor: float) -> Any:
    """``value * factor`` in the value's dtype: integers by way of float64, truncated."""
    if factor == 1.0:
        return value
    if _fractional(value.dtype):
        wide = jnp.float32 if value.dtype.itemsize < 4 else value.dtype
        return (value.astype(wide) * jnp.asarray(factor, wide)).astype(value.dtype)
    return (value.astype(jnp.float64) * factor).astype(value.dtype)


# --- reductions of several values on one device --------------------------------------------------


def adasum(values: list[Any]) -> Any:
    """Adasum of a power of two of values: pairs at growing distances, each combined as
    ``(1 - ab / 2aa) a + (1 - ab / 2bb) b`` (Maleki et al., 2020, arXiv:2006.02924, eq. 4), so
    orthogonal ones add up and parallel ones average.

    Args:
        values: NumPy or JAX arrays; dot products are computed in float64.
    """
    if len(values) == 1:
        return values[0]
    pairs = [_adasum_pair(*values[i : i + 2]) for i in range(0, len(values), 2)]
    return adasum(pairs)


_TINY = math.sqrt(2.2250738585072014e-308)  # a smaller squared norm counts as 0: no division


def _adasum_pair(a: Any, b: Any) -> Any:
    wide_a, wide_b = a.astype(jnp.float64), b.astype(jnp.float64)
    dot, norm_a, norm_b = (wide_a * wide_b).sum(), (wide_a**2).sum(), (wide_b**2).sum()
    of_a = jnp.where(norm_a < _TINY, 1.0, 1 - dot / (2 * jnp.maximum(norm_a, _TINY)))
    of_b = jnp.where(norm_b < _TINY, 1.0, 1 - dot / (2 * jnp.maximum(norm_b, _TINY)))
    return (of_a * wide_a + of_b * wide_b).astype(a.dtype)


_LOCAL: dict[ReduceOp, Callable[[Any], Any]] = {
    ReduceOp.Average: lambda parts: jnp.sum(parts, 0, dtype=parts.dtype),
    ReduceOp.Sum: lambda parts: jnp.sum(parts, 0, dtype=parts.dtype),
    ReduceOp.Min: lambda parts: jnp.min(parts, 0),
    ReduceOp.Max: lambda parts: jnp.max(parts, 0),
    ReduceOp.Product: lambda parts: jnp.prod(parts, 0, dtype=parts.dtype),
    ReduceOp.Adasum: lambda parts: adasum([parts[i] for i in range(parts.shape[0])]),
}


# --- one set: XLA's collectives ------------------------------------------------------------------


def _all_reduce(kernel: Kernel, value: Any, axes: Axes) -> Any:
    if kernel.op in (ReduceOp.Average, ReduceOp.Sum):
        return jax.lax.psum(value, axes)
    if kernel.op == ReduceOp.Min:
        return jax.lax.pmin(value, axes)
    if kernel.op == ReduceOp.Max:
        return jax.lax.pmax(value, axes)
    return _LOCAL[kernel.op](jax.lax.all_gather(value, axes))


def _reduce_scatter(kernel: Kernel, value: Any, axes: Axes) -> Any:
    if kernel.op in (ReduceOp.Average, ReduceOp.Sum):
        return jax.lax.psum_scatter(value, axes, scatter_dimension=0, tiled=True)
    pieces = value.reshape(jax.lax.axis_size(axes), -1, *value.shape[1:])
    return _LOCAL[kernel.op](_all_to_all(kernel, pieces, axes))


def _all_gather(kernel: Kernel, value: Any, axes: Axes) -> Any:
    return jax.lax.all_gather(value, axes, axis=0, tiled=True)


def _all_to_all(kernel: Kernel, value: Any, axes: Axes) -> Any:
    return jax.lax.all_to_all(value, axes, split_axis=0, concat_axis=0, tiled=True)


def _broadcast(kernel: Kernel, value: Any, axes: Axes) -> Any:
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        parts = (_broadcast(kernel, part, axes) for part in (value.real, value.imag))
        return jax.lax.complex(*parts)
    own = jax.lax.axis_index(axes) == kernel.root
    if value.dtype == jnp.bool_:
        return jax.lax.pmax(jnp.where(own, value, False), axes)
    if _fractional(value.dtype):
        # Its bits: a sum with zeros would make 0.0 of -0.0.
        bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
        return jax.lax.bitcast_convert_type(_broadcast(kernel, bits, axes), value.dtype)
    return jax.lax.psum(jnp.where(own, value, jnp.zeros_like(value)), axes)


_WHOLE: dict[str, Callable[[Kernel, Any, Axes], Any]] = {
    "allreduce": _all_reduce,
    "reducescatter": _reduce_scatter,
    "allgather": _all_gather,
    "alltoall": _all_to_all,
    "broadcast": _broadcast,
}


# --- several sets: from the members' values ------------------------------------------------------


def _piece(parts: Any, position: Any) -> Any:
    """Of each member's value the piece that is for the member at ``position``."""
    count = parts.shape[0]
    pieces = parts.reshape(count, count, -1, *parts.shape[2:])
    return jax.lax.dynamic_index_in_dim(pieces, position, axis=1, keepdims=False)


_PARTS: dict[str, Callable[[Kernel, Any, Any], Any]] = {
    "allreduce": lambda kernel, parts, position: _LOCAL[kernel.op](parts),
    "reducescatter": lambda kernel, parts, position: _LOCAL[kernel.op](_piece(parts, position)),
    "allgather": lambda kernel, parts, position: parts.reshape(-1, *parts.shape[2:]),
    "alltoall": lambda kernel, parts, position: _piece(parts, position).reshape(
        -1, *parts.shape[2:]
    ),
    "broadcast": lambda kernel, parts, position: parts[kernel.root],
}
