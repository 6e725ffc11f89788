"""``_grouped_mm``: one matrix product per group of rows, of columns, or of what is summed over.

XLA has an operation for it, ``ragged_dot``, which TPUs and GPUs compute in time that doesn't depend
on the number of groups. On the CPU JAX takes it apart into a product per group of all rows, so
there blocks of rows are multiplied one after another, each by the matrices of its groups alone. On
TPUs shards are multiplied by kernels that do the same (`megablox.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.linalg import megablox
from xla_dtensor.lowering.linalg.matmul import _precision, dot
from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers
from xla_dtensor.lowering.workarounds import MANY_RAGGED_PRODUCTS, RAGGED_PRODUCTS, Workaround

_GROUPED = (torch.float32, torch.bfloat16, torch.float16)
_BATCHED = ((2,), (1,)), ((0,), (0,))
_LARGEST_BLOCK = 512
_FEW = 8  # groups, of which float32 products compile for TPUs


@meta_of("_grouped_mm")
def grouped_mm_meta(x, y, offs=None, bias=None, out_dtype=None):
    """torch's own takes bfloat16 in CUDA's alignment only; its CPU kernel takes these dtypes, and
    XLA any strides."""

    def check(holds, message):
        if not holds:
            raise RuntimeError(message())

    check(
        x.dtype in _GROUPED and y.dtype == x.dtype,
        lambda: (
            f"Expected mat_a and mat_b to be both Float32, BFloat16 or Float16 matrices, got "
            f"{x.dtype} and {y.dtype}"
        ),
    )
    check(
        x.ndim in (2, 3) and y.ndim in (2, 3),
        lambda: f"mat_a and mat_b have to be 2 or 3 dimensional, got {x.ndim} and {y.ndim} dims",
    )
    # Both ragged in the contracted dim: torch compares the sizes nowhere, and reads past the end.
    check(
        x.shape[-1] == y.shape[-2],
        lambda: (
            "contraction dimension of mat_a and mat_b must match, got "
            f"{x.shape[-1]} and {y.shape[-2]}"
        ),
    )
    ragged = x.ndim == 2 or y.ndim == 2
    check((offs is not None) == ragged, lambda: "Have to provide offsets if there is a 2d matrix")
    if offs is not None:
        check(offs.ndim == 1, lambda: "offs has to be 1D")
        check(offs.dtype == torch.int32, lambda: "Offsets have to be int32")
    check(bias is None, lambda: "Bias not supported yet")
    check(
        out_dtype is None or out_dtype == x.dtype,
        lambda: f"Grouped gemm output dtype must match mat_a dtype, got {out_dtype}",
    )
    groups = [*x.shape[:-2], *y.shape[:-2], *(() if offs is None else offs.shape)]
    check(len(set(groups)) == 1, lambda: f"matrix batch sizes have to match, got {groups}")
    batch = groups[:1] if x.ndim == y.ndim else []
    return x.new_empty((*batch, x.shape[-2], y.shape[-1]))


@lowers("_grouped_mm")
def grouped_mm(x, y, offs=None, bias=None, out_dtype=None):
    """One product per group; ``offs`` holds the ends of the groups along the ragged dim: the
    rows of a 2-d ``x``, the columns of a 2-d ``y``, or, both 2-d, the contracted dim."""
    if offs is None:
        return dot(x, y, *_BATCHED)
    starts = jnp.concatenate([jnp.zeros(1, offs.dtype), offs[:-1]])
    if x.ndim == 2 and y.ndim == 3:
        return _products_of_rows(x, y, starts, offs)
    if x.ndim == 3:
        return _products_of_rows(y.T, x.transpose(0, 2, 1), starts, offs).T
    return _sums_of_products(x, y, starts, offs)


@jax.custom_batching.custom_vmap
def _products_of_rows(x: jax.Array, y: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
    """Each group's rows of ``x`` by its matrix of ``y``; rows of no group are zero."""
    if megablox.takes(x, y):
        return _own_rows(megablox.rows(x, y, _sizes(starts, ends), _precision()), ends)
    return _workaround(x, ends).choose(_rows_by_blocks, _rows_by_ragged_dot, x, y, starts, ends)


@_products_of_rows.def_vmap
def _batched_products_of_rows(
    axis_size: int, in_batched: Sequence[bool], *args: jax.Array
) -> tuple[jax.Array, bool]:
    """`jax.lax.ragged_dot` has no batch of ``x`` alone: every group's product, masked, instead."""

    def rows(x: jax.Array, y: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
        member = _members(x.shape[0], starts, ends)
        products = dot(jnp.where(member[:, :, None], x, 0), y, ((2,), (1,)), ((0,), (0,)))
        return jnp.sum(products, axis=0)

    axes = [0 if batched else None for batched in in_batched]
    return jax.vmap(rows, in_axes=axes, axis_size=axis_size)(*args), True


@jax.custom_batching.custom_vmap
def _sums_of_products(x: jax.Array, y: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
    """Each group's columns of ``x`` by its rows of ``y``: one matrix per group."""
    if megablox.takes(x, y):
        return megablox.sums(x, y, _sizes(starts, ends), _precision())
    return _workaround(x, ends).choose(_sums_by_blocks, _sums_by_ragged_dot, x, y, starts, ends)


@_sums_of_products.def_vmap
def _batched_sums_of_products(
    axis_size: int, in_batched: Sequence[bool], *args: jax.Array
) -> tuple[jax.Array, bool]:
    def sums(x: jax.Array, y: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
        member = _members(x.shape[1], starts, ends)
        return dot(jnp.where(member[:, None, :], x, 0), y, ((2,), (0,)))

    axes = [0 if batched else None for batched in in_batched]
    return jax.vmap(sums, in_axes=axes, axis_size=axis_size)(*args), True


def _members(rows: int, starts: jax.Array, ends: jax.Array) -> jax.Array:
    """Which rows each group has."""
    position = jnp.arange(rows, dtype=ends.dtype)
    return (position >= starts[:, None]) & (position < ends[:, None])


def _sizes(starts: jax.Array, ends: jax.Array) -> jax.Array:
    return (ends - starts).astype(np.int32)


def _own_rows(out: jax.Array, ends: jax.Array) -> jax.Array:
    """Zeros in rows of no group, which backends needn't compute."""
    return jnp.where((jnp.arange(len(out), dtype=ends.dtype) < ends[-1])[:, None], out, 0)


def _workaround(x: jax.Array, ends: jax.Array) -> Workaround:
    many = x.dtype == np.float32 and len(ends) > _FEW
    return MANY_RAGGED_PRODUCTS if many else RAGGED_PRODUCTS


# --- XLA's own operation -------------------------------------------------------------------------


def _rows_by_ragged_dot(
    x: jax.Array, y: jax.Array, starts: jax.Array, ends: jax.Array
) -> jax.Array:
    out = jax.lax.ragged_dot(
        x,
        y,
        _sizes(starts, ends),
        precision=_precision(),
        preferred_element_type=math_dtype(x.dtype),
    )
    return _own_rows(out, ends)


_CONTRACTED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (0,)), ((), ())),
    lhs_ragged_dimensions=[1],
    rhs_group_dimensions=[],
)


def _sums_by_ragged_dot(
    x: jax.Array, y: jax.Array, starts: jax.Array, ends: jax.Array
) -> jax.Array:
    return jax.lax.ragged_dot_general(
        x,
        y,
        _sizes(starts, ends),
        _CONTRACTED,
        precision=_precision(),
        preferred_element_type=math_dtype(x.dtype),
    )


# --- blocks of rows ------------------------------------------------------------------------------


class _Visits:
    """The pairs of a block of rows and a group that has some of them, in order.

    Attributes:
        block: rows in a block.
        rows: in whole blocks, at least as many as there are.
        count: as many pairs as there can be.
    """

    def __init__(self, rows: int, starts: jax.Array, ends: jax.Array) -> None:
        groups = len(ends)
        mean = max(1, rows // max(1, groups))
        self.block = min(_LARGEST_BLOCK, 1 << max(3, (mean - 1).bit_length()))
        blocks = -(-rows // self.block)
        self.rows, self.count = blocks * self.block, blocks + groups - 1
        self._starts, self._ends = starts, ends
        visited = jnp.where(ends > starts, (ends - 1) // self.block - starts // self.block + 1, 0)
        self._until = jnp.cumsum(visited)
        self._before = self._until - visited

    def at(self, visit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The group, the block's first row, and which of its rows are the group's."""
        group = jnp.searchsorted(self._until, visit, side="right")
        beyond = group >= len(self._ends)
        group = jnp.minimum(group, len(self._ends) - 1)
        start, end = self._starts[group], self._ends[group]
        first = (start // self.block + visit - self._before[group]) * self.block
        first = jnp.clip(first, 0, self.rows - self.block).astype(np.int32)
        row = first + jnp.arange(self.block, dtype=np.int32)
        return group, first, (row >= start) & (row < end) & ~beyond


def _rows_by_blocks(x: jax.Array, y: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
    if not (x.size and y.size):
        return jnp.zeros((len(x), y.shape[2]), math_dtype(x.dtype))
    visits = _Visits(len(x), starts, ends)
    padded = jnp.pad(x, ((0, visits.rows - len(x)), (0, 0)))

    def visit(out: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        group, first, own = visits.at(number)
        rows = jax.lax.dynamic_slice_in_dim(padded, first, visits.block)
        product = dot(rows, y[group], ((1,), (0,)))
        before = jax.lax.dynamic_slice_in_dim(out, first, visits.block)
        new = jnp.where(own[:, None], product, before)
        return jax.lax.dynamic_update_slice_in_dim(out, new, first, 0), None

    out = jnp.zeros((visits.rows, y.shape[2]), math_dtype(x.dtype))
    return jax.lax.scan(visit, out, jnp.arange(visits.count))[0][: len(x)]


def _sums_by_blocks(x: jax.Array, y: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
    out = jnp.zeros((len(ends), x.shape[0], y.shape[1]), math_dtype(x.dtype))
    if not (x.size and y.size):
        return out
    visits = _Visits(len(y), starts, ends)
    more = visits.rows - len(y)
    x, y = jnp.pad(x, ((0, 0), (0, more))), jnp.pad(y, ((0, more), (0, 0)))

    def visit(out: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        group, first, own = visits.at(number)
        columns = jax.lax.dynamic_slice_in_dim(x, first, visits.block, 1)
        rows = jax.lax.dynamic_slice_in_dim(y, first, visits.block)
        # Both: what isn't a group's may be no number.
        product = dot(jnp.where(own, columns, 0), jnp.where(own[:, None], rows, 0), ((1,), (0,)))
        total = jax.lax.dynamic_index_in_dim(out, group, keepdims=False) + product
        return jax.lax.dynamic_update_index_in_dim(out, total, group, 0), None

    return jax.lax.scan(visit, out, jnp.arange(visits.count))[0]


are(Kind.PRODUCT, "_grouped_mm")
are(Kind.SLICED, "_grouped_mm")
