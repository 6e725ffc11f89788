"""Values between the host (CPU torch tensors, NumPy) and the devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from xla_dtensor.base.dtypes import to_jax_dtype, to_torch_dtype
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.forms.form import Form
from xla_dtensor.runtime import abstract, arrays
from xla_dtensor.runtime.abstract_array import AbstractArray
from xla_dtensor.runtime.kept.program import KeptProgram

# Dtypes that torch can't hand to NumPy; their bits travel as integers of the same size.
_AS_BITS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a CPU tensor's value: the tensor may change while JAX, which runs behind, reads
    what it was given.

    Raises:
        TypeError: XLA doesn't have the dtype.
    """
    dtype = to_jax_dtype(tensor.dtype)
    # NumPy has no lazy conjugate or negative views: torch refuses to hand such a tensor over.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    bits = _AS_BITS.get(tensor.dtype)
    if bits is not None:
        return np.array(tensor.contiguous().view(bits).numpy().view(dtype), order="C")
    return np.array(tensor.numpy(), order="C")


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """A CPU tensor with a copy of ``array``'s values."""
    dtype = to_torch_dtype(array.dtype)
    bits = _AS_BITS.get(dtype)
    array = np.array(array, order="C")  # jax's host arrays are read-only
    if bits is not None:
        as_int = np.dtype(np.int16) if bits is torch.int16 else np.dtype(np.uint8)
        return torch.from_numpy(array.view(as_int)).view(dtype)
    return torch.from_numpy(array)


def viewed_by_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous CPU tensor's own memory, not a copy: nobody may write to the tensor any more."""
    bits = _AS_BITS.get(tensor.dtype)
    tensor = tensor.detach()
    if bits is None:
        return tensor.numpy()
    return tensor.view(bits).numpy().view(to_jax_dtype(tensor.dtype))


def to_devices(tensor: torch.Tensor, form: Form) -> Any:
    """The array in ``form`` of a CPU tensor's value: each device receives its shard alone."""
    if abstract.current() is not None:
        return AbstractArray(form.array_shape, form.jax_dtype, form.sharding)
    value = to_numpy(tensor)
    with jax.enable_x64(True):
        if form.sharding is None:
            # A copy: a compiled step may overwrite the memory, which is NumPy's otherwise.
            return _copier(value.shape, value.dtype)(value)
        if form.padded_shape == form.shape:
            return arrays.put(value, form.sharding)
        # `arrays.put`, above, asks this itself: several processes have to have the same value.
        arrays.check_equal(value)
        return arrays.put_shards(
            form.padded_shape, form.sharding, lambda index: padded_slice(value, index)
        )


_copiers: Cache[Any, KeptProgram] = Cache("copies from the host", 512)


def _copier(shape: tuple[int, ...], dtype: np.dtype) -> KeptProgram:
    """``jax.numpy.array`` of such values, which compiles a program for each shape, too."""
    make = lambda: KeptProgram(jax.numpy.copy, lambda: "copy")
    return _copiers.get_or_make((shape, dtype), make)


def padded_slice(value: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
    """``value[index]``, where the index may reach beyond ``value``: zeros there."""
    out_shape, inside = [], []
    for size, part in zip(value.shape, index, strict=True):
        start = part.start or 0
        stop = part.stop if part.stop is not None else size
        out_shape.append(stop - start)
        inside.append(slice(start, min(stop, size)) if start < size else slice(0, 0))
    piece = value[tuple(inside)]
    if list(piece.shape) == out_shape:
        return piece
    out = np.zeros(out_shape, value.dtype)
    out[tuple(slice(0, n) for n in piece.shape)] = piece
    return out


def fetch(array: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The elements of a padded array that are within ``shape``."""
    if 0 in shape:
        # Of an array without elements, XLA gives shards of other shapes than their sharding says.
        return np.zeros(shape, array.dtype)
    value = arrays.get(array)
    return value[tuple(slice(0, n) for n in shape)]


def to_host(array: Any) -> torch.Tensor:
    """A CPU tensor with the value of a (logical) array."""
    return from_numpy(arrays.get(array))
