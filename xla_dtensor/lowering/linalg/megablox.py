"""JAX's MegaBlox kernels, products in groups for TPUs in Pallas.

XLA's own operation, ``ragged_dot``, doesn't compile for TPUs in float32 from 16 groups on ("ran out
of memory in memory space vmem", libtpu 0.0.52). These visit the blocks of rows that a group has,
and no others, in memory that doesn't depend on the number of groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering.context import here

_LANES = 128
_LARGEST = 512
_DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))
_NAME = "megablox_product_of_groups"


def takes(x: jax.Array, y: jax.Array) -> bool:
    """Whether the kernels compute a product of these, here: on a TPU, with a device's shards, as
    XLA can't cut them."""
    at = here()
    is_there = at.platform == "tpu" and bool(at.axes) and 0 not in (*x.shape, *y.shape)
    return is_there and x.dtype == y.dtype and x.dtype in _DTYPES


def is_product(name: str) -> bool:
    """Whether a ``jit`` of this name is one of these products, of its first two arguments."""
    return name == _NAME


def rows(x: jax.Array, y: jax.Array, sizes: jax.Array, precision: Any) -> jax.Array:
    """Each group's rows of ``x``, ``[rows, K]``, by its matrix of ``y``, ``[groups, K, N]``, in
    float32; rows of no group can be anything.

    Args:
        sizes: how many rows each group has, int32.
        precision: of float32 products, a `jax.lax.Precision`.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    tiling = _tiling(len(x), len(sizes))
    out = _named(gmm, tiling, precision)(_in_blocks(x, tiling[0], 0), y, sizes)
    return out[: len(x)]


def sums(x: jax.Array, y: jax.Array, sizes: jax.Array, precision: Any) -> jax.Array:
    """Each group's columns of ``x``, ``[K, rows]``, by its rows of ``y``, ``[rows, N]``, in
    float32: ``[groups, K, N]``."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiling = _tiling(len(y), len(sizes))
    padded = _in_blocks(x, tiling[0], 1), _in_blocks(y, tiling[0], 0)
    return _named(tgmm, tiling, precision)(*padded, sizes)


def _named(
    kernel: Callable[..., Any], tiling: tuple[int, int, int], precision: Any
) -> Callable[..., Any]:
    def call(x: jax.Array, y: jax.Array, sizes: jax.Array) -> Any:
        # The kernel multiplies as precisely as products do by default, half precision in one pass.
        narrow = x.dtype != np.float32 or precision is jax.lax.Precision.DEFAULT
        with (
            # The kernel knows only these two precisions.
            jax.default_matmul_precision("default" if narrow else "highest"),
            # Its own numbers are int32, which they aren't where 64-bit types are on.
            jax.enable_x64(False),
        ):
            return kernel(
                x,
                y,
                sizes,
                preferred_element_type=np.dtype(np.float32),
                tiling=tiling,
                interpret=here().platform != "tpu",  # for tests
            )

    call.__name__ = _NAME
    return jax.jit(call)


def _tiling(rows: int, groups: int) -> tuple[int, int, int]:
    """The sizes of a block along the rows and the other two dims. Blocks of more rows than a group
    has are computed in vain."""
    mean = max(1, rows // max(1, groups))
    block = min(_LARGEST, max(_LANES, 1 << (mean - 1).bit_length()))
    return block, _LARGEST, _LARGEST


def _in_blocks(x: jax.Array, block: int, dim: int) -> jax.Array:
    missing = -x.shape[dim] % block
    return jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)]) if missing else x
