"""Running sums, products and the like along a dim, in a form that XLA partitions right.

JAX makes a ``reduce_window`` of them. XLA's partitioner gives two of one operand the padding of
the first (`base/xla_faults.py:WINDOW_PADDING`), so that ``logcumsumexp`` beside ``cumsum`` counts
zeros; and one over what a number was repeated to ends the process (`CONSTANT_WINDOWS`). A barrier
before it hides both what the operand is and that others have it, too. Sums are made so: a window
is compiled in a quarter of the time, and XLA knows what to do with it on a TPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from xla_dtensor.lowering.context import Target, at, here
from xla_dtensor.lowering.partitioned.padding import padded
from xla_dtensor.lowering.partitioned.strided import spread, strided_slice

Arrays = tuple[jax.Array, ...]

Combine = Callable[[Arrays, Arrays], Arrays]
"""Takes earlier and later values. A function of a module: programs are told apart by its name."""


def added(earlier: Arrays, later: Arrays) -> Arrays:
    """The `Combine` of running sums."""
    return (earlier[0] + later[0],)


def scan(combine: Combine, arrays: Sequence[jax.Array], dim: int) -> Arrays:
    """A running reduction along ``dim`` by ``combine``, which is associative: a prefix scan.

    One equation until it is lowered: written out, that of 256 values is 200, each of which would be
    traced, and be laid out over the step. Sums become one ``reduce_window`` (`_is_window`).

    Args:
        combine: takes earlier and later values.
        arrays: of one shape. A scalar stays what it is.

    Example::

        (sums,) = scan(added, [x], 0)
    """
    shape = arrays[0].shape
    if not shape or shape[dim] < 2:
        return tuple(arrays)
    where = here()
    return tuple(
        _primitive.bind(
            *arrays,
            combine=combine,
            axis=dim % len(shape),
            platform=where.platform,
            devices=where.devices,
        )
    )


def _written_out(
    *arrays: jax.Array, combine: Combine, axis: int, platform: str, devices: int
) -> Arrays:
    if combine is added and _is_window(arrays[0].dtype, platform):
        return (lax.cumsum(lax.optimization_barrier(arrays[0]), axis),)
    with at(Target(platform, devices=devices)):
        return _prefixes(combine, arrays, axis)


def _is_window(dtype: np.dtype, platform: str) -> bool:
    """Whether a running sum is a window over all that is earlier: not of complex numbers, nor of 64
    bits on TPUs, where libtpu's compiler takes 13 s for one of float64."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    return platform != "tpu" or dtype.itemsize <= 4


def _prefixes(combine: Combine, arrays: Sequence[jax.Array], dim: int) -> Arrays:
    """The work is proportional to the length, the number of steps to its logarithm (Blelloch,
    "Prefix Sums and Their Applications", 1990)."""
    shape = arrays[0].shape
    n = shape[dim]
    if n < 2:
        return tuple(arrays)

    def every_second(start: int, count: int) -> Arrays:
        return tuple(strided_slice(x, dim, start, count, 2) for x in arrays)

    def position(count: int) -> jax.Array:
        sizes = [count if d == dim else 1 for d in range(len(shape))]
        return lax.broadcasted_iota(np.int32, sizes, dim)

    def first(arrays: Sequence[jax.Array], count: int) -> Arrays:
        return tuple(strided_slice(x, dim, 0, count, 1) for x in arrays)

    pairs = n // 2
    odd = _prefixes(combine, combine(every_second(0, pairs), every_second(1, pairs)), dim)
    rest = (n - 1) // 2  # even positions behind the first
    even = first(arrays, rest + 1)
    if rest:
        after = combine(first(odd, rest), every_second(2, rest))
        widths = [(1, 0) if d == dim else (0, 0) for d in range(len(shape))]
        is_first = position(rest + 1) == 0
        even = tuple(
            jnp.where(is_first, x, padded(y, widths)) for x, y in zip(even, after, strict=True)
        )
    is_odd = (position(n) & 1) == 1
    return tuple(
        jnp.where(is_odd, spread(o, dim, 1, 2, n), spread(e, dim, 0, 2, n))
        for o, e in zip(odd, even, strict=True)
    )


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    given = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(functools.partial(_written_out, **params), primals, tuple(given))


def _batch(arrays: Any, dims: Any, *, axis: int, **params: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    batched = [batching.bdim_at_front(x, d, size) for x, d in zip(arrays, dims, strict=True)]
    return _primitive.bind(*batched, axis=axis + 1, **params), [0] * len(batched)


_primitive = Primitive("prefix_scan")
_primitive.multiple_results = True
_primitive.def_impl(
    jax.jit(_written_out, static_argnames=("combine", "axis", "platform", "devices"))
)
_primitive.def_abstract_eval(lambda *arrays, **_: list(arrays))
mlir.register_lowering(_primitive, mlir.lower_fun(_written_out, multiple_results=True))
ad.primitive_jvps[_primitive] = _jvp
batching.primitive_batchers[_primitive] = _batch
