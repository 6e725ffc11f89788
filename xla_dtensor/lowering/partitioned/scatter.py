"""Writes to positions given by index tensors, in the form that XLA partitions right.

XLA's SPMD partitioner gets two things wrong about scatters (`base/xla_faults.py:BATCHED_SCATTERS`,
`UNEVEN_SCATTERS`; cases in tests/lowering/partitioning.py):

- A scatter along one dim in batches over others has wrong numbers in some layouts. So a scatter
  with an index per element gets a coordinate for *every* dim, those of the batch being counted.
- Where index tensors are sharded unevenly, what pads their last shards writes too. The partitioner
  fills it with anything, or with zeros: index 0, value 0. So padding is sent out of range and gets
  the value 0 (`is_inside` tells it), which is harmless if values are added; after other writes the
  elements at index 0 are computed again, without a scatter (`_repaired`). Where a dim is shorter
  than the mesh may be, so that shards are nothing but padding, and index and value are sharded by
  different axes, even that is lost on the way from one to the other: the padding has a copy of some
  value, and after additions, too, those elements are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.lowering.context import here
from xla_dtensor.lowering.partitioned.cut import cut
from xla_dtensor.lowering.partitioned.padding import padded

# Per dim of the array written to: indices, all of shapes that broadcast, or the whole dim.
Positions = Sequence["jax.Array | slice"]


def narrow(index: jax.Array, size: int) -> jax.Array:
    """Indices into ``size`` positions, as 32-bit integers where those suffice: 64-bit ones are
    emulated on TPUs."""
    return index.astype(np.int32 if size < 2**31 else np.int64)


def write(x: jax.Array, positions: Positions, method: str, value: jax.Array) -> jax.Array:
    """``x.at[positions].<method>(value)``; positions out of range are dropped.

    Args:
        x: the array written to.
        positions: for the first dims of ``x``; negative ones aren't wrapped.
        method: ``"set"``, ``"add"``, ``"multiply"``, ``"max"`` or ``"min"``.
        value: of the dtype of ``x``; broadcast to what ``x[positions]`` would be.
    """
    if x.dtype.kind == "c" and method in ("set", "add"):
        # In its parts: XLA can't pad a complex one (`base/xla_faults.py:COMPLEX_SCATTERS`).
        parts = zip((x.real, x.imag), (value.real, value.imag), strict=True)
        return lax.complex(*(write(part, positions, method, v) for part, v in parts))
    dims = [d for d, p in enumerate(positions) if not isinstance(p, slice)]
    indices = jnp.broadcast_arrays(*(positions[d] for d in dims))
    full = indices[0].shape
    # Where the dims of the indices are in the value, by NumPy's rule.
    at = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    rest = [n for d, n in enumerate(x.shape) if d not in dims]
    value = jnp.broadcast_to(value, (*rest[:at], *full, *rest[at:]))
    if value.size == 0:
        return x
    # A dim of length 1 could be padded too, and XLA would know that its only index is 0.
    shape = tuple(n for n in full if n > 1)
    value = value.reshape(*rest[:at], *shape, *rest[at:])
    if shape != full:
        # If it is sharded, a reshape to other dims ends in a program that XLA's verifier refuses
        # (seed 19726 of the fuzzer); the largest of one is that one, hidden so that XLA makes no
        # reshape of it.
        ones = tuple(d for d, n in enumerate(full) if n == 1)
        indices = [lax.optimization_barrier(i).max(ones) for i in indices]
    indices = [narrow(i, x.shape[d] + 1) for d, i in zip(dims, indices, strict=True)]
    # No dim shorter than a mesh axis may be: `base/xla_faults.py:SHORT_SCATTERS`.
    longer = [(0, max(here().devices - n, 0)) for n in shape]
    if any(map(any, longer)):
        indices = [padded(i, longer, x.shape[d]) for d, i in zip(dims, indices, strict=True)]
        value = padded(value, [(0, 0)] * at + longer + [(0, 0)] * (len(rest) - at))
        shape = indices[0].shape
    inside = is_inside(shape)
    inside_value = inside.reshape(*[1] * at, *shape, *[1] * (len(rest) - at))
    value = jnp.where(inside_value, value, jnp.zeros((), value.dtype))
    indices[0] = jnp.where(inside, indices[0], x.shape[dims[0]])
    if not shape:
        indices = lax.optimization_barrier(indices)  # `base/xla_faults.py:SINGLE_SCATTERS`
        # Twice, of which one is out of range: `base/xla_faults.py:MOVED_SCATTERS`.
        outside = [narrow(jnp.asarray(x.shape[d]), x.shape[d] + 1) for d in dims]
        indices = [jnp.stack(pair) for pair in zip(indices, outside, strict=True)]
        value = jnp.broadcast_to(jnp.expand_dims(value, at), (*rest[:at], 2, *rest[at:]))
    places = dict(zip(dims, indices, strict=True))
    where = tuple(places.get(d, slice(None)) for d in range(len(positions)))
    out = getattr(x.at[where], method)(value, mode="drop", wrap_negative_indices=False)
    adds = method == "add" or (method == "max" and x.dtype.kind == "b")
    if not shape or (adds and min(shape) >= here().devices):
        return out
    first = inside
    for index in indices:
        first &= index == 0
    axes = tuple(range(at, at + len(shape)))
    first = first.reshape(inside_value.shape)
    return _repaired(x, out, dims, method, value, first, axes)


def write_each(
    x: jax.Array, dim: int, index: jax.Array, method: str, value: jax.Array
) -> jax.Array:
    """``x.at[i, j, index[i, j, k]].<method>(value[i, j, k])``, with the index in place of ``dim``.

    ``index`` and ``value`` have the shape of ``x`` or are smaller, and any length in ``dim``.
    """
    few = index.shape[dim]
    if few <= _FEW and x.shape[dim] <= _FEW_OF * few:
        apart = [n for d, n in enumerate(x.shape) if d != dim]
        if apart == [n for d, n in enumerate(index.shape) if d != dim]:
            return _write_few(x, dim, index, method, value)
    positions = [
        narrow(lax.broadcasted_iota(np.int32, index.shape, d), size)
        for d, size in enumerate(x.shape)
    ]
    positions[dim] = index
    return write(x, positions, method, value)


# As many positions in so many: comparing costs less than a scatter does, and communicates nothing.
_FEW = 8
_FEW_OF = 32


def _write_few(
    x: jax.Array, dim: int, index: jax.Array, method: str, value: jax.Array
) -> jax.Array:
    """`write_each` by comparing each position along ``dim`` with the few that are written to, as a
    router's top experts: element by element, in whatever layout. Later values win, as on a CPU."""
    position = lax.broadcasted_iota(np.int32, x.shape, dim)
    index = narrow(index, x.shape[dim])
    for i in range(index.shape[dim]):
        start, stop = [0] * x.ndim, list(index.shape)
        start[dim], stop[dim] = i, i + 1
        at, written = cut(index, start, stop), cut(value, start, stop)
        if method != "set":
            written = _COMBINED[method](x.dtype)[2](x, written)
        x = jnp.where(position == at, written, x)
    return x


def is_inside(shape: tuple[int, ...]) -> jax.Array:
    """True at every element of ``shape``, and false where XLA pads an array of that shape."""
    result = jnp.ones(shape, bool)
    for dim, size in enumerate(shape):
        result &= lax.broadcasted_iota(np.int32, shape, dim) < size
    return result


def _repaired(
    x: jax.Array,
    out: jax.Array,
    dims: list[int],
    method: str,
    value: jax.Array,
    first: jax.Array,
    axes: tuple[int, ...],
) -> jax.Array:
    """``out`` with the elements at index 0 of all ``dims`` computed from those of ``value`` that
    ``first`` says are written there; ``axes`` are the index tensors' dims in both."""
    corner = tuple(slice(0, 1) if d in dims else slice(None) for d in range(x.ndim))
    kept = x[corner]
    at_corner = jnp.ones((1,) * x.ndim, bool)
    for d in dims:
        shape = [-1 if e == d else 1 for e in range(x.ndim)]
        at_corner = at_corner & (jnp.arange(x.shape[d]) == 0).reshape(shape)
    if method == "set":
        # Any of several: torch leaves open which. The last one.
        order = _order([value.shape[a] for a in axes]).reshape(
            [value.shape[d] if d in axes else 1 for d in range(value.ndim)]
        )
        last = jnp.max(jnp.where(first, order, -1))
        # By the greatest, as a sum with zeros would lose the sign of -0.0.
        least = np.asarray(lowest(value.dtype)).astype(value.dtype)
        if np.isnan(least):  # of 8 bits, without infinities
            least = np.asarray(jnp.finfo(value.dtype).min)
        chosen = jnp.max(jnp.where(order == last, value, least), axis=axes).reshape(kept.shape)
        # Not put together with `kept`, which XLA cuts out of a sharded dim by a sum, too.
        out = jnp.where(at_corner, kept, out)
        return jnp.where(at_corner & (last >= 0), chosen, out)
    identity, reduce, combine = _COMBINED[method](value.dtype)
    written = reduce(jnp.where(first, value, identity), axis=axes).reshape(kept.shape)
    return jnp.where(at_corner, combine(kept, written).astype(x.dtype), out)


def _order(shape: Sequence[int]) -> jax.Array:
    result = jnp.zeros(tuple(shape), np.int64)
    for dim, size in enumerate(shape):
        result = result * size + lax.broadcasted_iota(np.int64, tuple(shape), dim)
    return result


def lowest(dtype: Any) -> Any:
    """The identity of max."""
    if dtype.kind == "b":
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """The identity of min."""
    if dtype.kind == "b":
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


# Method -> its identity, how to reduce with it, how to combine two arrays.
_COMBINED: dict[str, Callable[[Any], tuple[Any, Any, Any]]] = {
    "add": lambda dtype: (jnp.zeros((), dtype), jnp.sum, jnp.add),
    "max": lambda dtype: (jnp.asarray(lowest(dtype), dtype), jnp.max, jnp.maximum),
    "min": lambda dtype: (jnp.asarray(highest(dtype), dtype), jnp.min, jnp.minimum),
    "multiply": lambda dtype: (jnp.ones((), dtype), jnp.prod, jnp.multiply),
}
