"""Tensors made from numbers. Memory that torch leaves uninitialised (`empty`) is zero here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.registry import lowers


def factory_dtype(dtype: torch.dtype | None) -> np.dtype:
    """``dtype``, or where it is None torch's default floating dtype."""
    return to_jax_dtype(dtype or torch.get_default_dtype())


def _number_dtype(dtype: torch.dtype | None, *numbers: Any) -> np.dtype:
    """``dtype``, or the one that torch infers from ``numbers``."""
    if dtype is not None:
        return to_jax_dtype(dtype)
    kinds = {np.dtype(jnp.result_type(n)).kind for n in numbers}
    default = torch.get_default_dtype()
    if "c" in kinds:
        return to_jax_dtype(default.to_complex())
    if not kinds <= {"b", "i", "u"}:
        return to_jax_dtype(default)
    return np.dtype(bool) if kinds == {"b"} else np.dtype(np.int64)


def _filled(size: Sequence[int], value: Any, dtype: np.dtype) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(value).astype(dtype), tuple(size))


# By size -------------------------------------------------------------------------------------


@lowers("zeros", "empty.memory_format", "_efficientzerotensor")
@lowers("empty_strided", "empty_permuted")
def zeros(
    size: Sequence[int], order: Sequence[int] = (), *, dtype: torch.dtype | None = None
) -> jax.Array:
    return _filled(size, 0, factory_dtype(dtype))


@lowers("ones")
def ones(size: Sequence[int], *, dtype: torch.dtype | None = None) -> jax.Array:
    return _filled(size, 1, factory_dtype(dtype))


@lowers("full")
def full(size: Sequence[int], fill_value: Any, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _filled(size, fill_value, _number_dtype(dtype, fill_value))


@lowers("scalar_tensor")
def scalar_tensor(s: Any, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _filled((), s, factory_dtype(dtype))


# By another tensor's dtype and shape ---------------------------------------------------------


def dtype_like(x: jax.Array, dtype: torch.dtype | None) -> np.dtype:
    return x.dtype if dtype is None else to_jax_dtype(dtype)


@lowers("zeros_like", "empty_like")
def zeros_like(x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _filled(x.shape, 0, dtype_like(x, dtype))


@lowers("ones_like")
def ones_like(x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _filled(x.shape, 1, dtype_like(x, dtype))


@lowers("full_like")
def full_like(x: jax.Array, fill_value: Any, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _filled(x.shape, fill_value, dtype_like(x, dtype))


@lowers("new_zeros", "new_empty", "new_empty_strided")
def new_zeros(
    x: jax.Array,
    size: Sequence[int],
    order: Sequence[int] = (),
    *,
    dtype: torch.dtype | None = None,
) -> jax.Array:
    return _filled(size, 0, dtype_like(x, dtype))


@lowers("new_ones")
def new_ones(x: jax.Array, size: Sequence[int], *, dtype: torch.dtype | None = None) -> jax.Array:
    return _filled(size, 1, dtype_like(x, dtype))


@lowers("new_full")
def new_full(
    x: jax.Array, size: Sequence[int], fill_value: Any, *, dtype: torch.dtype | None = None
) -> jax.Array:
    return _filled(size, fill_value, dtype_like(x, dtype))


# Ranges --------------------------------------------------------------------------------------


def _computation_dtype(dtype: np.dtype) -> np.dtype:
    """Where positions times a step are computed: half precision cannot count."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


@lowers("arange", static_scalars=True)
def arange(end: Any, *, dtype: torch.dtype | None = None) -> jax.Array:
    return arange_step(0, end, 1, dtype=dtype)


@lowers("arange.start", "arange.start_step", static_scalars=True)
def arange_step(
    start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None
) -> jax.Array:
    # How many there are depends on torch's rounding in the target dtype, so torch is asked.
    meta = torch.arange(start, end, step, dtype=dtype, device="meta")
    target = to_jax_dtype(meta.dtype)
    if target.kind in "iub":  # torch truncates the operands, not the results
        start, step = int(start), int(step)
        wide = np.dtype(np.int64)
    else:
        wide = _computation_dtype(target)
    positions = lax.iota(wide, len(meta))
    return (positions * wide.type(step) + wide.type(start)).astype(target)


def line(start: Any, end: Any, steps: int, dtype: np.dtype) -> jax.Array:
    """Counted from both ends, so that the last value is ``end`` itself."""
    start, end = jnp.asarray(start).astype(dtype), jnp.asarray(end).astype(dtype)
    if steps == 1:
        return start.reshape(1)
    step = (end - start) / max(steps - 1, 1)
    position = lax.iota(np.int64, steps)
    forward = start + step * position.astype(dtype)
    backward = end - step * (steps - 1 - position).astype(dtype)
    return jnp.where(position < steps // 2, forward, backward)


def _line_dtypes(dtype: torch.dtype | None, *numbers: Any) -> tuple[np.dtype, np.dtype]:
    """The result's dtype, and the one to compute in."""
    complex_result = any(np.dtype(jnp.result_type(n)).kind == "c" for n in numbers)
    if dtype is None and complex_result:
        dtype = torch.get_default_dtype().to_complex()
    target = factory_dtype(dtype)
    return target, np.dtype(np.float64) if target.kind in "iub" else _computation_dtype(target)


@lowers("linspace", *(f"linspace.{a}" for a in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")))
def linspace(start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    target, wide = _line_dtypes(dtype, start, end)
    if target.kind in "iub":
        start, end = (jnp.trunc(jnp.asarray(v).astype(wide)) for v in (start, end))
    return line(start, end, steps, wide).astype(target)


@lowers("logspace", *(f"logspace.{a}" for a in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")))
def logspace(
    start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: torch.dtype | None = None
) -> jax.Array:
    target, wide = _line_dtypes(dtype, start, end)
    if target.kind in "iub":
        start, end = (jnp.trunc(jnp.asarray(v).astype(wide)) for v in (start, end))
    return jnp.power(wide.type(base), line(start, end, steps, wide)).astype(target)


@lowers("eye")
def eye(n: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    return eye_m(n, n, dtype=dtype)


@lowers("eye.m")
def eye_m(n: int, m: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    return jnp.eye(n, m, dtype=factory_dtype(dtype))


def _triangle(mask: np.ndarray, dtype: torch.dtype | None) -> jax.Array:
    return jnp.asarray(np.stack(np.nonzero(mask)), dtype=to_jax_dtype(dtype or torch.int64))


@lowers("tril_indices")
def tril_indices(
    row: int, col: int, offset: int = 0, *, dtype: torch.dtype | None = None
) -> jax.Array:
    return _triangle(np.tri(row, col, offset, dtype=bool), dtype)


@lowers("triu_indices")
def triu_indices(
    row: int, col: int, offset: int = 0, *, dtype: torch.dtype | None = None
) -> jax.Array:
    return _triangle(~np.tri(row, col, offset - 1, dtype=bool), dtype)


are(
    Kind.LIKE,
    *("empty_like", "zeros_like", "ones_like", "full_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
)
are(Kind.FILL, "fill_.*", "zero_", "masked_fill_.*", "_foreach_zero_")
are(Kind.FILL, "index_fill_.int_Scalar", "index_fill_.int_Tensor")
