"""Writes to views that have elements of their base several times."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.lowering.registry import ViewLowering


def put_changes(
    view: ViewLowering, base: jax.Array, value: jax.Array, size: int, args: Any, kwargs: Any
) -> jax.Array:
    """``base`` after its view, in which elements may be several times, has become ``value``.

    Only what has changed is put back: where one place of an element was written (to a row of an
    expanded tensor, one of several windows), the others still have what was there before.

    Args:
        size: the bytes that a write can have changed by themselves: of the narrowest type as which
            the view was looked at.
    """
    assert view.greatest is not None
    now = _patterns(value.astype(base.dtype), size)
    then = _patterns(view.get(base, *args, **kwargs), size)
    parts = []
    for own, new, old in zip(_patterns(base, size), now, then, strict=True):
        # All places that were written have the same difference, the rest has none.
        parts.append(own ^ view.greatest(new ^ old, base.shape, *args, **kwargs))
    return _of_patterns(parts, base.dtype)


def _patterns(x: jax.Array, size: int) -> list[jax.Array]:
    """The bits of ``x`` as unsigned integers of at most ``size`` bytes."""
    if x.dtype.kind == "c":
        return [*_patterns(x.real, size), *_patterns(x.imag, size)]
    if x.dtype.kind == "b":
        return [x.astype(np.uint8)]
    size = min(size, x.dtype.itemsize)
    bits = lax.bitcast_convert_type(x, np.dtype(f"u{size}"))
    return [bits] if bits.ndim == x.ndim else [bits[..., i] for i in range(bits.shape[-1])]


def _of_patterns(parts: list[jax.Array], dtype: np.dtype) -> jax.Array:
    """The inverse of `_patterns`."""
    if dtype.kind == "c":
        half, part = len(parts) // 2, np.dtype(f"f{dtype.itemsize // 2}")
        return lax.complex(_of_patterns(parts[:half], part), _of_patterns(parts[half:], part))
    if dtype.kind == "b":
        return parts[0].astype(bool)
    return lax.bitcast_convert_type(parts[0] if len(parts) == 1 else jnp.stack(parts, -1), dtype)
