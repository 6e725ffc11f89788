"""Sums over all bits of a tensor, each with a weight of its place: equal where the values are.

The weight of an element is a product of numbers of its places in each dim, modulo 2**64, so what is
permuted, turned, missing or of another step has another sum. They are of whole arrays, and know
nothing of the boxes in which these are copied.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.forms.form import Form
from xla_dtensor.weights.recipes import Places


def of_sources(places: Places, arrays: Sequence[Any], dtype: np.dtype) -> int:
    """The checksum that the target should have.

    Args:
        arrays: the sources', in the order of ``places.sources``, in physical form.
        dtype: the target's.
    """
    total = 0
    for number, array in enumerate(arrays):
        weights = [_weights(d, n) for d, n in enumerate(places.shape)]
        if weights:
            mine = places.of == number
            own = np.zeros(array.shape[places.dim], np.uint64)
            # A source may be at several places of the target.
            np.add.at(own, places.at[mine], weights[places.dim][mine])
            weights[places.dim] = own
        total += _sum(array, weights, dtype)
    return total % 2**64


def of_target(array: Any, form: Form) -> set[int]:
    """The checksum of an array in ``form``: several where the devices' copies aren't the same."""
    weights = [_weights(d, n) for d, n in enumerate(form.shape)]
    copies: dict[Any, set[int]] = {}
    for shard in array.addressable_shards:
        own = [_padded(w, n)[s] for w, n, s in zip(weights, array.shape, shard.index, strict=True)]
        key = tuple(s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True))
        copies.setdefault(key, set()).add(_sum(shard.data, own, form.jax_dtype))
    if all(len(found) == 1 for found in copies.values()) and array.is_fully_addressable:
        return {sum(found.pop() for found in copies.values()) % 2**64}
    differ = any(len(found) > 1 for found in copies.values())
    return {-1} if differ else {_sum(array, weights, form.jax_dtype)}


def _weights(dim: int, size: int) -> np.ndarray:
    """Odd numbers, which differ from place to place and from dim to dim (splitmix64)."""
    with np.errstate(over="ignore"):
        x = (np.arange(size, dtype=np.uint64) + np.uint64(1 + 2**40 * dim)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def _padded(weights: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([weights, np.zeros(size - len(weights), np.uint64)])


def _sum(array: Any, weights: Sequence[np.ndarray], dtype: np.dtype) -> int:
    padded = [_padded(w, n) for w, n in zip(weights, array.shape, strict=True)]
    with jax.enable_x64(True):
        return int(_summed(array, padded, np.dtype(dtype)))


@functools.partial(jax.jit, static_argnums=2)
def _summed(array: Any, weights: Sequence[Any], dtype: Any) -> Any:
    bits = _bits(array.astype(dtype))
    for dim, weight in enumerate(weights):
        bits = bits * weight.reshape((-1,) + (1,) * (array.ndim - dim - 1))
    return jnp.sum(bits, dtype=np.uint64)


def _bits(x: Any) -> Any:
    if x.dtype == np.bool_:
        return x.astype(np.uint64)
    if jnp.iscomplexobj(x):
        return _bits(x.real) * np.uint64(3) + _bits(x.imag)
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(x, unsigned).astype(np.uint64)
