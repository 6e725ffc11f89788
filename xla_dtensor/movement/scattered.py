"""Makes the TPU's compiler emit a reduce-scatter where it would all-reduce and slice.

Of a sum of which each device keeps a piece XLA's partitioner writes an all-reduce and a slice; the
backend's compiler makes one operation of them. The TPU's (libtpu 0.0.52) doesn't where pieces are
cut out of the last dim of 16-bit numbers, each exactly `TILE` wide. It does where they are narrower
or wider, of 32-bit numbers, and along any other dim. So such a sum is asked for with its last two
dims swapped, and XLA computes the product in that order.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.forms.form import Form
from xla_dtensor.lowering.workarounds import SCATTERED_COLUMNS
from xla_dtensor.mesh import mesh_dim_axes

TILE = 128
"""Columns of a tile of a TPU's memory."""

RING = 32
"""Up to so many devices XLA's partitioner computes large products piece by piece in a ring, in
whichever order of dims; swapped, they may need more memory."""


def scattered(value: Any, source: Form, target: Form) -> Any:
    """The traced logical ``value`` of ``source``, which is to get the sharding of ``target``: a sum
    of which each device keeps some columns in an order of dims in which it needn't be given all."""
    if target.sharding is None or not _keeps_a_tile(source, target):
        return value
    return _primitive.bind(value, sharding=target.computed_sharding)


def _keeps_a_tile(source: Form, target: Form) -> bool:
    """Whether more than `RING` devices add up, and each keeps `TILE` columns of it."""
    if len(target.shape) < 2 or source.mesh is None or source.placements is None:
        return False
    assert target.frame is not None
    sizes, cut = target.frame.sizes, target.dim_axes[-1]
    pending = {
        axis
        for placement, axes in zip(source.placements, mesh_dim_axes(source.mesh), strict=True)
        if placement.is_partial()
        for axis in axes
    }
    adding = math.prod(sizes[axis] for axis in cut if axis in pending)
    pieces = math.prod(sizes[axis] for axis in cut)
    return adding > RING and target.shape[-1] == TILE * pieces


# An operation of its own, since what is added up is known when it is lowered: a gradient that was
# computed in bfloat16 and cast arrives as float32, and XLA adds up before the cast.
_primitive = Primitive("scattered")
_primitive.def_impl(lambda value, **_: value)
_primitive.def_abstract_eval(lambda value, **_: value)


def _lower(context: Any, value: Any, *, sharding: Any) -> Any:
    if not _is_narrow(value):
        return [value]
    by_rows = functools.partial(_by_rows, sharding=sharding)
    chosen = functools.partial(SCATTERED_COLUMNS.choose, by_rows, lambda value: value)
    return mlir.lower_fun(chosen, multiple_results=False)(context, value)


def _is_narrow(value: Any) -> bool:
    """Whether these are 16-bit numbers, or were before they were cast."""
    owner = value.owner
    if isinstance(owner, ir.OpView | ir.Operation) and owner.name == "stablehlo.convert":
        value = owner.operands[0]
    element = ir.RankedTensorType(value.type).element_type
    return isinstance(element, ir.BF16Type | ir.F16Type)


def _by_rows(value: Any, *, sharding: Any) -> Any:
    """``value`` in ``sharding``, which XLA is asked for with the last two dims swapped."""
    spec = [*sharding.spec, *[None] * (value.ndim - len(sharding.spec))]
    spec[-2], spec[-1] = spec[-1], spec[-2]
    swapped = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    turned = jax.lax.with_sharding_constraint(jnp.swapaxes(value, -1, -2), swapped)
    return jnp.swapaxes(turned, -1, -2)


# Not cached: the lowering looks at what its operand is made by.
mlir.register_lowering(_primitive, _lower, cacheable=False)
