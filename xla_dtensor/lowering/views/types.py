"""Views that see elements as another type: other bits, real parts, conjugates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.lowering.registry import lowers_view


def _bits(x: jax.Array) -> jax.Array:
    """``x`` with types that XLA cannot bitcast replaced by ones with the same bytes."""
    if x.dtype.kind == "b":
        return x.astype(np.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return view_as_real(x).reshape(*x.shape[:-1], -1) if x.ndim else view_as_real(x)
    return x


def _reinterpret(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """The bytes of ``x`` read as ``dtype``; the last dim grows or shrinks with the item size."""
    if x.dtype == dtype:
        return x
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        parts = _reinterpret(x, part)
        if x.dtype.itemsize == dtype.itemsize and x.ndim == 0:
            return view_as_complex(parts.reshape(2))
        return view_as_complex(parts.reshape(*x.shape[:-1], -1, 2))
    if dtype.kind == "b":
        return _reinterpret(x, np.dtype(np.uint8)) != 0
    source = _bits(x)
    old, new = source.dtype.itemsize, dtype.itemsize
    shape = source.shape
    if old == new:
        out = lax.bitcast_convert_type(source, dtype)
    elif old > new:  # adds a dim of old // new
        out = lax.bitcast_convert_type(source, dtype)
        shape = (*shape[:-1], shape[-1] * (old // new)) if shape else (old // new,)
    else:  # consumes a last dim of new // old
        shape = (*shape[:-1], shape[-1] // (new // old))
        out = lax.bitcast_convert_type(source.reshape(*shape, new // old), dtype)
    if x.ndim == 0 and x.dtype.itemsize == dtype.itemsize:
        shape = ()
    return out.reshape(shape)


def _put_dtype(base: jax.Array, value: jax.Array, dtype: torch.dtype) -> jax.Array:
    return _reinterpret(value.astype(to_jax_dtype(dtype)), base.dtype).reshape(base.shape)


@lowers_view("view.dtype", put=_put_dtype)
def view_dtype(base: jax.Array, dtype: torch.dtype) -> jax.Array:
    return _reinterpret(base, to_jax_dtype(dtype))


def _put_as_real(base: jax.Array, value: jax.Array) -> jax.Array:
    return lax.complex(value[..., 0], value[..., 1]).astype(base.dtype)


@lowers_view("view_as_real", put=_put_as_real)
def view_as_real(base: jax.Array) -> jax.Array:
    return jnp.stack([base.real, base.imag], axis=-1)


def _put_as_complex(base: jax.Array, value: jax.Array) -> jax.Array:
    return view_as_real(value).astype(base.dtype)


@lowers_view("view_as_complex", put=_put_as_complex)
def view_as_complex(base: jax.Array) -> jax.Array:
    return lax.complex(base[..., 0], base[..., 1])


def _put_conj(base: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.conj(value).astype(base.dtype)


@lowers_view("_conj", put=_put_conj)
def conj(base: jax.Array) -> jax.Array:
    return jnp.conj(base)


def _put_neg(base: jax.Array, value: jax.Array) -> jax.Array:
    return (-value).astype(base.dtype)


@lowers_view("_neg_view", put=_put_neg)
def neg_view(base: jax.Array) -> jax.Array:
    return -base
