"""torch's type promotion for the operands of a lowering."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.base.dtypes import to_jax_dtype, to_torch_dtype


def is_scalar(x: Any) -> bool:
    """Whether ``x`` is a number of the program rather than a tensor: a Python number, or the
    traced form of one."""
    return isinstance(x, bool | int | float | complex) or bool(getattr(x, "weak_type", False))


def _python_type(x: Any) -> type:
    if isinstance(x, bool | int | float | complex):
        return type(x)
    kind = np.dtype(x.dtype).kind
    return {"b": bool, "i": int, "u": int, "c": complex}.get(kind, float)


_SCALAR_CATEGORY = {bool: 0, int: 1, float: 2, complex: 3}


def result_type(*operands: Any) -> np.dtype:
    """The dtype in which torch computes ``operands`` (arrays and numbers).

    Dimensioned tensors decide first; 0-d tensors, then numbers, only where they are of a higher
    category (bool < int < float < complex). Definition: "Type Promotion Doc" of
    ``torch.Tensor``'s tensor attributes page.
    """
    dimensioned: torch.dtype | None = None
    zero_dim: torch.dtype | None = None
    number: type | None = None
    for x in operands:
        if is_scalar(x):
            kind = _python_type(x)
            if number is None or _SCALAR_CATEGORY[kind] > _SCALAR_CATEGORY[number]:
                number = kind
            continue
        dtype = to_torch_dtype(x.dtype)
        if x.ndim:
            dimensioned = dtype if dimensioned is None else torch.promote_types(dimensioned, dtype)
        else:
            zero_dim = dtype if zero_dim is None else torch.promote_types(zero_dim, dtype)

    result = dimensioned
    if zero_dim is not None and (result is None or _category(zero_dim) > _category(result)):
        result = _combine(result, zero_dim)
    if number is not None and (result is None or _SCALAR_CATEGORY[number] > _category(result)):
        result = _with_number(result, number)
    assert result is not None, "result_type of no operands"
    return to_jax_dtype(result)


def _combine(lower: torch.dtype | None, higher: torch.dtype) -> torch.dtype:
    """The result where 0-d operands are of a higher category than the dimensioned ones."""
    if lower is None:
        return higher
    if lower.is_floating_point and higher.is_complex:
        return _complex_of(lower)
    return torch.promote_types(lower, higher)


def _complex_of(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype is torch.float64 else torch.complex64


def _category(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype is torch.bool else 1


def _with_number(dtype: torch.dtype | None, number: type) -> torch.dtype:
    default = torch.get_default_dtype()
    if number is complex:
        return _complex_of(dtype if dtype is not None and dtype.is_floating_point else default)
    if number is float:
        return default
    return torch.int64 if number is int else torch.bool


def promote(*operands: Any) -> tuple[jax.Array, ...]:
    """``operands`` as arrays of their common torch dtype (not broadcast)."""
    return _as(result_type(*operands), operands)


def is_exactly(number: Any, value: float) -> bool:
    """Whether a number argument is ``value``. One that is traced is of a value for which no code
    of its own is needed."""
    return isinstance(number, bool | int | float | complex) and number == value


def promote_for_math(*operands: Any) -> tuple[jax.Array, ...]:
    """As `promote`, with half-precision results computed in float32, as torch does: only the
    operation's result is rounded, and numbers such as 0.1 keep their precision."""
    return _as(math_dtype(result_type(*operands)), operands)


def promote_to_float(*operands: Any) -> tuple[jax.Array, ...]:
    """As `promote_for_math`, with integer results computed in torch's default floating dtype."""
    return _as(math_dtype(float_dtype(result_type(*operands))), operands)


def float_dtype(dtype: Any) -> np.dtype:
    """``dtype``, or torch's default floating dtype in place of an integer one."""
    dtype = np.dtype(dtype)
    return to_jax_dtype(torch.get_default_dtype()) if dtype.kind in "biu" else dtype


def math_dtype(dtype: Any) -> np.dtype:
    """The dtype in which torch computes on elements of ``dtype``: float32 for smaller floats."""
    dtype = np.dtype(dtype)
    small_float = dtype.itemsize < 4 and to_torch_dtype(dtype).is_floating_point
    return np.dtype(np.float32) if small_float else dtype


def converted(x: jax.Array, dtype: Any) -> jax.Array:
    """``x`` as ``dtype``. XLA takes a bool that has become a float for a mask, and its products
    for selections, in which NaN and infinity vanish (`base/xla_faults.py:MASKS`)."""
    if x.dtype == bool and np.dtype(dtype).kind not in "biu":
        x = x.astype(np.int8)
    return x.astype(dtype)


def is_integral(x: jax.Array) -> bool:
    return np.dtype(x.dtype).kind in "biu"


def is_complex(x: jax.Array) -> bool:
    return np.dtype(x.dtype).kind == "c"


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """``x`` as ``dtype``; complex to real drops the imaginary part, as in torch."""
    if is_complex(x) and np.dtype(dtype).kind not in "cb":
        x = x.real
    return converted(x, dtype)


def _as(dtype: np.dtype, operands: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    return tuple(converted(jnp.asarray(x), dtype) for x in operands)
