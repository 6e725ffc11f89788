"""torch dtypes and their JAX counterparts, one table read both ways."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

_TO_JAX: dict[torch.dtype, np.dtype] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
    torch.float8_e4m3fnuz: np.dtype(ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2fnuz: np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_TO_TORCH = {jax_dtype: torch_dtype for torch_dtype, jax_dtype in _TO_JAX.items()}


def to_jax_dtype(dtype: torch.dtype) -> np.dtype:
    """The NumPy/JAX dtype with the same bits as ``dtype``.

    Raises:
        TypeError: XLA has no such dtype (complex32, quantised dtypes).
    """
    try:
        return _TO_JAX[dtype]
    except KeyError:
        raise TypeError(
            f"{dtype} has no XLA counterpart; convert the tensor to one of "
            f"{', '.join(str(d) for d in _TO_JAX)} first"
        ) from None


def to_torch_dtype(dtype: np.dtype) -> torch.dtype:
    """The torch dtype with the same bits as the NumPy/JAX ``dtype``."""
    try:
        return _TO_TORCH[np.dtype(dtype)]
    except KeyError:
        raise TypeError(f"the JAX dtype {dtype} has no torch counterpart") from None
