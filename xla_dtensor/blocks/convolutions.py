"""Convolutions as products of matrices: one for each place of the window, or of the result.

XLA's convolutions round otherwise in a loop than where they stand alone (JAX 0.10.2, CPU), and its
products don't.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_dtensor.blocks.mapped import Cut, best, count_of, mapped
from xla_dtensor.lowering.ops.rounded import rounded
from xla_dtensor.mesh import Frame

Ints = Sequence[int]


def convolution(
    equation: Any, left: jax.Array, right: jax.Array, frame: Frame | None
) -> list[jax.Array]:
    """A ``conv_general_dilated`` without groups, of float32 or wider.

    The batch is cut into blocks, or the output channels, or those that are summed over, which are
    the batch where a kernel's gradient is computed.
    """
    params = equation.params
    numbers, spatial = params["dimension_numbers"], left.ndim - 2
    # Batch, channels, places; output channels, input channels, places.
    left = jnp.transpose(left, numbers.lhs_spec)
    right = jnp.transpose(right, numbers.rhs_spec)
    zero = jnp.zeros((), left.dtype)
    dilated = zip(params["padding"], params["lhs_dilation"], strict=True)
    edges = [(low, high, step - 1) for (low, high), step in dilated]
    left = lax.pad(left, zero, [(0, 0, 0), (0, 0, 0), *edges])
    shape = [equation.outvars[0].aval.shape[d] for d in numbers.out_spec]
    ways = [
        (left.shape[0], Cut(count_of(left.shape[0]), (0, None), (0,))),
        (right.shape[0], Cut(count_of(right.shape[0]), (None, 0), (1,))),
        (left.shape[1], Cut(count_of(left.shape[1]), (1, 1), (None,))),
    ]
    function = functools.partial(
        _products,
        places=shape[2:],
        strides=params["window_strides"],
        dilation=params["rhs_dilation"],
        precision=params["precision"],
        dtype=left.dtype,
    )
    (result,) = mapped(function, [left, right], best(ways), frame)
    order = sorted(range(spatial + 2), key=lambda d: numbers.out_spec[d])
    return [jnp.transpose(result, order)]


def _products(
    left: jax.Array,
    right: jax.Array,
    *,
    places: Ints,
    strides: Ints,
    dilation: Ints,
    precision: Any,
    dtype: Any,
) -> list[jax.Array]:
    """Batch, output channels, places. A product for each place of the window, added up, or for each
    place of the result, whichever are fewer."""
    window = right.shape[2:]
    product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=dtype)

    def slices(at: Ints, size: Ints, step: Ints) -> jax.Array:
        last = [a + (n - 1) * s + 1 for a, n, s in zip(at, size, step, strict=True)]
        whole = left.shape[:2]
        return lax.slice(left, (0, 0, *at), (*whole, *last), (1, 1, *step))

    def times(at: Ints, by: Ints) -> list[int]:
        return [a * b for a, b in zip(at, by, strict=True)]

    every = lambda sizes: itertools.product(*map(range, sizes))
    if math.prod(window) <= math.prod(places):
        total: Any = None
        for at in every(window):
            moved = slices(times(at, dilation), places, strides)
            part = product(moved, right[(..., *at)], (((1,), (1,)), ((), ())))
            total = part if total is None else rounded("add", total, part)
        return [jnp.moveaxis(total, -1, 1)]
    dims = tuple(range(1, left.ndim))
    found = [
        product(slices(times(at, strides), window, dilation), right, ((dims, dims), ((), ())))
        for at in every(places)
    ]
    return [jnp.stack(found, -1).reshape(*found[0].shape, *places)]
