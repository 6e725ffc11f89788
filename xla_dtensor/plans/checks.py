"""Checks that a lowering's results have the shapes and dtypes that torch's have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.base import executor
from xla_dtensor.base.dtypes import to_torch_dtype
from xla_dtensor.forms.form import Form
from xla_dtensor.plans.ops import OpInfo
from xla_dtensor.runtime import arrays


def checked(value: Any, shape: tuple[int, ...], dtype: Any, info: OpInfo) -> Any:
    """``value`` in the dtype that torch gives; raise if its shape isn't torch's."""
    if not isinstance(value, jax.core.Tracer):
        value = jnp.asarray(value)
    if tuple(value.shape) != shape:
        if info.mutated and value.size <= max(1, _numel(shape)):
            return jnp.broadcast_to(value, shape).astype(dtype)
        raise AssertionError(
            f"the lowering of {info.name} gave shape {tuple(value.shape)} where torch gives "
            f"{shape}: a bug in xla_dtensor, please report it"
        )
    return _cast(value, dtype)


# torch's order of categories, by NumPy's dtype.kind; "V" is bfloat16 and the 8-bit floats.
_CATEGORIES = {"b": 0, "i": 1, "u": 1, "f": 2, "V": 2, "c": 3}


def check_castable(value: Any, form: Form) -> None:
    """Refuse to write a result to a tensor that would lose its fraction or imaginary part.

    torch's meta kernels let numbers through here (``int_tensor.mul_(0.5)``).
    """
    if getattr(value, "dtype", None) == form.jax_dtype:
        return
    result = jnp.result_type(value)
    wanted = _CATEGORIES.get(form.jax_dtype.kind, 2)
    if wanted and _CATEGORIES.get(result.kind, 2) > wanted:
        raise RuntimeError(
            f"result type {to_torch_dtype(result)} can't be cast to the desired output type "
            f"{form.dtype}"
        )


def _cast(value: Any, dtype: Any) -> Any:
    if value.dtype == dtype:
        return arrays.strong(value)
    if value.dtype.kind == "c" and dtype.kind != "c":
        value = value.real
    # A trace computes an optimizer's scalars in double precision and rounds them where they are
    # used: in float32 `1 - beta**step` has three digits left in the first steps.
    if value.ndim == 0 and value.dtype == np.float64 and dtype == np.float32:
        wide = executor.current().wide
        if wide is not None:
            return wide.narrowed(value)
    return value.astype(dtype)


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
