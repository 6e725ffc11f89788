"""Torch functions that read a CPU tensor without an operation (``.numpy()``), seen in a trace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xla_dtensor.base.numbers.printed import only_printed
from xla_dtensor.base.numbers.python_numbers import is_pythons, is_symbolic, like_a_number
from xla_dtensor.base.ours import SaysCpu
from xla_dtensor.base.torch_private import FUSED_OPTIMIZERS, count_of_function_modes, pytree
from xla_dtensor.compilation.trace.doubles import (
    MAKERS,
    body_of,
    call_with_numbers,
    is_put_together,
)
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.views import is_at_traced, refuse_offset
from xla_dtensor.tensors.of_form import is_ours
from xla_dtensor.tensors.printing import shows_values

_Tensor = torch.Tensor
# Functions with which a backward pass begins.
BACKWARD = frozenset({_Tensor.backward, torch.autograd.backward, torch.autograd.grad})
# Functions that show all values; then those that give the memory, to which Python may write.
_TEXT = frozenset({_Tensor.__repr__, _Tensor.__format__})
_MEMORY = frozenset(
    {
        *(_Tensor.numpy, _Tensor.__array__, _Tensor.__dlpack__),
        *(_Tensor.untyped_storage, _Tensor.storage),
        *(_Tensor.apply_, _Tensor.map_, _Tensor.map2_),
    }
)
_READS = _MEMORY | _TEXT | {_Tensor.tolist}
# Functions that give one element's value, mostly by an operation (`HostOperations._item`).
_ITEMS = frozenset({_Tensor.__float__, _Tensor.__int__, _Tensor.__index__, _Tensor.__bool__})
# Functions that make a tensor of lists of tensors, whose values C++ reads; and functions that read
# the values of all arguments but the first.
_OF_LISTS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_BY_VALUES = frozenset({_Tensor.new_tensor, _Tensor.tensor_split, torch.tensor_split})


def _kind(value: Any) -> Any:
    return value if value is None else type(value)


# Attributes of a tensor: the name in messages, and the value that is compared in later calls.
_ASKED: dict[Any, tuple[str, Callable[[torch.Tensor], Any]]] = {
    _Tensor.requires_grad.__get__: ("requires_grad", lambda t: t.requires_grad),
    _Tensor.is_leaf.__get__: ("is_leaf", lambda t: t.is_leaf),
    _Tensor.grad_fn.__get__: ("the kind of grad_fn", lambda t: _kind(t.grad_fn)),
    _Tensor.stride: ("stride()", lambda t: t.stride()),
    _Tensor.is_contiguous: ("stride()", lambda t: t.stride()),
    _Tensor.storage_offset: ("storage_offset()", lambda t: t.storage_offset()),
    _Tensor.is_conj: ("is_conj()", lambda t: t.is_conj()),
    _Tensor.is_neg: ("is_neg()", lambda t: t.is_neg()),
}


class HostReads(TorchFunctionMode):
    """Sees what hands out a CPU tensor's memory without an operation, and functions of torch's that
    are given symbolic numbers.

    Args:
        operations: the trace's `HostOperations`.
    """

    def __init__(self, operations: Any) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and is_on_host(args[0]):
            given = self._of_host(func, args[0])
            if given is not args[0]:
                args = given, *args[1:]
            if func in _ITEMS:
                return self._item(func, *args)
        if args and (func in _OF_LISTS or func in _BY_VALUES):
            given = args[1:] if func in _BY_VALUES else args[0]
            data = args[1] if func is _Tensor.new_tensor and len(args) > 1 else args[0]
            if func not in MAKERS or not is_put_together(data):
                for x in pytree.tree_leaves(given):
                    if x is not args[0] and is_on_host(x):
                        self._operations.look(x, "the elements")
        if func is torch.Tensor.storage_offset and is_at_traced(getattr(args[0], "_steps", ())):
            refuse_offset()
        if func in BACKWARD and not count_of_function_modes():
            # In this mode, so that Python in the backward pass (hooks, recomputation) is seen.
            with self:
                return body_of(func)(*args, **(kwargs or {}))
        numbers = any(map(is_pythons, args)) or (kwargs and any(map(is_pythons, kwargs.values())))
        numbers = numbers or func in MAKERS or func in FUSED_OPTIMIZERS
        plain = set(types) <= {torch.Tensor} or func is _Tensor.new_tensor
        if numbers and plain:  # not functorch's wrappers
            return call_with_numbers(self, self._operations.stand_ins, func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        # As a number that passes for a float where code asks for its type.
        is_item = func is torch.Tensor.item and is_symbolic(result)
        return like_a_number(result) if is_item else result

    def _of_host(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        """A function is given a CPU tensor; the tensor that is to answer."""
        operations = self._operations
        if func in _READS:
            if func not in _TEXT or not only_printed(_frame_of_user()):
                operations.look(tensor, f"{func.__name__}()")
                if func in _TEXT:
                    shows_values()
            if func in _MEMORY:
                operations.hand_out(tensor)
        elif func in _ASKED:
            return operations.asked(tensor, *_ASKED[func])
        elif func == _GRAD:
            operations.asks_grad(tensor)
        elif func == _SET_DATA and not operations.made(tensor):
            raise DataDependentError(
                f"the step gives a CPU tensor {list(tensor.shape)} from outside other memory "
                "(.data =): that would happen when it is traced, not in every call; copy_() keeps "
                "the memory"
            )
        elif getattr(func, "__name__", "") not in OF_ANY_SIZE:
            operations.size_matters(tensor)
        return tensor

    def _item(self, func: Any, tensor: torch.Tensor) -> Any:
        before = self._operations.items
        result = func(tensor)
        if self._operations.items == before:  # C++ read it without: torch.FloatTensor([t[0]])
            self._operations.look(tensor, f"{func.__name__}()")
        return result


_SET_DATA, _GRAD = _Tensor.data.__set__, _Tensor.grad.__get__
# What computes one value of all elements, however many there are.
OF_ANY_SIZE = frozenset({"sum", "mean", "max", "min", "any", "all", "prod"})


def is_on_host(x: Any) -> bool:
    """Whether something is a CPU tensor."""
    apart = is_ours(x) or isinstance(x, SaysCpu)
    return isinstance(x, torch.Tensor) and not apart and x.device.type == "cpu"


def _frame_of_user() -> FrameType | None:
    """Where a method of a tensor was called, behind torch's Python."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _BEHIND:
        frame = frame.f_back
    return frame


_BEHIND = frozenset({__name__, "torch._tensor", "torch.overrides"})
