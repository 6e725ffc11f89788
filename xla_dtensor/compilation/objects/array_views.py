"""NumPy arrays in a step's results that share memory with another array or a CPU tensor.

The other one is from outside of the step, an argument, or a result, too. Each call makes such a
view. So it does of tensors that share an array's memory (``torch.from_numpy``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from xla_dtensor.base.torch_private.attributes import cpp_address
from xla_dtensor.compilation.objects.kind import ObjectKind


class _Memory:
    """Memory as NumPy takes it. The array that is made keeps this, and so ``whole``."""

    def __init__(self, whole: Any, interface: dict[str, Any]) -> None:
        self.whole, self.__array_interface__ = whole, interface


class ArrayView(ObjectKind):
    """An array by where it lies in the memory of its one part."""

    def taken(self, value: np.ndarray, whole: Any) -> tuple[Any, list[Any]]:
        """What makes ``value`` again of ``whole``, as `split` gives it."""
        start, readonly = value.__array_interface__["data"]
        offset = start - _start(whole)
        return (value.dtype, value.shape, value.strides, offset, readonly), [whole]

    def make(self, data: Any, parts: list[Any]) -> Any:
        dtype, shape, strides, offset, readonly = data
        start = _start(parts[0]) + offset
        interface = {"shape": shape, "strides": strides, "data": (start, readonly), "version": 3}
        memory = _Memory(parts[0], interface | {"typestr": dtype.str, "descr": dtype.descr})
        return np.asarray(memory)


class TensorView(ArrayView):
    """A CPU tensor likewise; its memory is that of an array."""

    def taken(self, value: torch.Tensor, whole: Any) -> tuple[Any, list[Any]]:
        return super().taken(value.numpy(), whole)

    def make(self, data: Any, parts: list[Any]) -> Any:
        return torch.from_numpy(super().make(data, parts))


ARRAY_VIEW, TENSOR_VIEW = ArrayView(), TensorView()


def whole_of(value: Any, outside: Iterable[Any]) -> Any:
    """The array or CPU tensor that is shown by an array which the step has made: one of those
    ``outside``, or the step's own; None if it has memory of its own."""
    if type(value) is not np.ndarray or value.base is None or value.dtype.hasobject:
        return None
    base: Any = value.base
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    for whole in outside:
        if isinstance(whole, np.ndarray):
            if np.may_share_memory(value, whole):
                return whole
        elif type(base) is type(whole) is torch.Tensor and _memory(base) == _memory(whole):
            return whole
    return base if type(base) is np.ndarray else None


def array_of(value: Any, outside: Iterable[Any]) -> Any:
    """The array among those ``outside`` whose memory a CPU tensor shows; None if there is none."""
    if type(value) is not torch.Tensor or value.device.type != "cpu":
        return None
    if value.layout is not torch.strided or value.untyped_storage().resizable():
        return None  # torch allocated it: no NumPy array shares it
    try:
        shown = value.numpy()
    except (TypeError, RuntimeError):  # NumPy has no such dtype, or it requires grad, is conjugate
        return None
    arrays = (whole for whole in outside if isinstance(whole, np.ndarray))
    return next((whole for whole in arrays if np.may_share_memory(shown, whole)), None)


def _memory(tensor: torch.Tensor) -> int:
    return cpp_address(tensor.untyped_storage())


def _start(whole: Any) -> int:
    if isinstance(whole, torch.Tensor):
        return whole.data_ptr()
    return whole.__array_interface__["data"][0]
