"""The greatest and the least number along dims, of which a NaN is both, as in torch.

XLA brings together what devices found by a maximum that leaves out NaNs
(`base/xla_faults.py:LOST_NANS`). Integers have none: floats go as integers of the same order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering.context import here


def greatest(x: jax.Array, axes: Any = None, keepdims: bool = False) -> jax.Array:
    """``jnp.max``, whatever shards ``x`` has."""
    return _found(x, axes, keepdims, jnp.max, here().devices)


def least(x: jax.Array, axes: Any = None, keepdims: bool = False) -> jax.Array:
    """``jnp.min``, whatever shards ``x`` has."""
    return _found(x, axes, keepdims, jnp.min, here().devices)


def of_parts(x: jax.Array, axes: tuple[int, ...], reduce_op: str) -> jax.Array:
    """What devices have along ``axes`` brought together, outside of lowerings.

    Args:
        reduce_op: a ``Partial`` placement's: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or
            ``"product"``.
    """
    if reduce_op in _EXTREMES:
        return _found(x, axes, False, _EXTREMES[reduce_op], 2)
    result: jax.Array = _OTHERS[reduce_op](x, axis=axes).astype(x.dtype)
    return result


_EXTREMES: dict[str, Any] = {"max": jnp.max, "min": jnp.min}
_OTHERS: dict[str, Any] = {"sum": jnp.sum, "avg": jnp.mean, "product": jnp.prod}


def _found(x: jax.Array, axes: Any, keepdims: bool, find: Any, devices: int) -> jax.Array:
    if devices == 1 or not jnp.issubdtype(x.dtype, jnp.floating) or x.size == 0:
        result: jax.Array = find(x, axis=axes, keepdims=keepdims)
        return result
    whole = np.dtype(f"int{8 * x.dtype.itemsize}")
    limits = np.iinfo(whole)
    most = limits.max if find is jnp.max else limits.min
    key = jnp.where(jnp.isnan(x), most, _in_order(jax.lax.bitcast_convert_type(x, whole)))
    found = find(key.astype(whole), axis=axes, keepdims=keepdims)
    return jax.lax.bitcast_convert_type(_in_order(found), x.dtype)  # of `most` that is a NaN


def _in_order(bits: jax.Array) -> jax.Array:
    """Bits of floats as integers of their order, and back: of negative ones all but the sign are
    turned round."""
    return jnp.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)
