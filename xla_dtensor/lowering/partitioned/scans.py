"""Running sums, products and the like along a dim, in a form that XLA partitions right.

JAX makes a ``reduce_window`` of them. XLA's partitioner gives two of one operand the padding of
the first (`base/xla_faults.py:WINDOW_PADDING`), so that ``logcumsumexp`` beside ``cumsum`` counts
zeros; and one over what a number was repeated to ends the process (`CONSTANT_WINDOWS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.lowering.partitioned.padding import padded
from xla_dtensor.lowering.partitioned.strided import spread, strided_slice

Arrays = tuple[jax.Array, ...]


def scan(
    combine: Callable[[Arrays, Arrays], Arrays], arrays: Sequence[jax.Array], dim: int
) -> Arrays:
    """A running reduction along ``dim`` by ``combine``, which is associative: a prefix scan.

    The work is proportional to the length, the number of steps to its logarithm (Blelloch, "Prefix
    Sums and Their Applications", 1990).

    Args:
        combine: takes earlier and later values.
        arrays: of one shape.
        dim: counted from the front.

    Example::

        (sums,) = scan(lambda a, b: (a[0] + b[0],), [x], 0)
    """
    shape = arrays[0].shape
    n = shape[dim]
    if n < 2:
        return tuple(arrays)

    def every_second(start: int, count: int) -> Arrays:
        return tuple(strided_slice(x, dim, start, count, 2) for x in arrays)

    def first(arrays: Sequence[jax.Array], count: int) -> Arrays:
        return tuple(strided_slice(x, dim, 0, count, 1) for x in arrays)

    pairs = n // 2
    odd = scan(combine, combine(every_second(0, pairs), every_second(1, pairs)), dim)
    rest = (n - 1) // 2  # even positions behind the first
    even = first(arrays, rest + 1)
    if rest:
        after = combine(first(odd, rest), every_second(2, rest))
        widths = [(1, 0) if d == dim else (0, 0) for d in range(len(shape))]
        is_first = lax.broadcasted_iota(np.int32, even[0].shape, dim) == 0
        even = tuple(
            jnp.where(is_first, x, padded(y, widths)) for x, y in zip(even, after, strict=True)
        )
    is_odd = lax.broadcasted_iota(np.int32, shape, dim) % 2 == 1
    return tuple(
        jnp.where(is_odd, spread(o, dim, 1, 2, n), spread(e, dim, 0, 2, n))
        for o, e in zip(odd, even, strict=True)
    )


def running(
    combine: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, dim: int
) -> jax.Array:
    """The same of one array: ``running(jnp.add, x, -1)``. A scalar stays what it is."""
    if not x.ndim:
        return x
    (out,) = scan(lambda earlier, later: (combine(*earlier, *later),), [x], dim % x.ndim)
    return out
