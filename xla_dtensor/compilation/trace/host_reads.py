"""Functions of torch that hand out a CPU tensor's memory without an operation, seen in a trace."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xla_dtensor.base.numbers.python_numbers import is_number, is_pythons, like_a_number
from xla_dtensor.base.torch_private import count_of_function_modes
from xla_dtensor.compilation.trace.doubles import MAKERS, body_of, call_with_numbers
from xla_dtensor.forms.views import is_at_traced, refuse_offset

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_READS = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__})


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
        if func in _READS and args and type(args[0]) in _PLAIN and args[0].device.type == "cpu":
            self._operations.look(args[0], f"{func.__name__}()")
        if func is torch.Tensor.storage_offset and is_at_traced(getattr(args[0], "_steps", ())):
            refuse_offset()
        if func in _BACKWARD and not count_of_function_modes():
            # Python that runs in it (recomputation, the user's functions and hooks) is seen, too.
            with self:
                return body_of(func)(*args, **(kwargs or {}))
        numbers = any(map(is_pythons, args)) or (kwargs and any(map(is_pythons, kwargs.values())))
        if (numbers or func in MAKERS) and set(types) <= {torch.Tensor}:  # which functorch names
            return call_with_numbers(self, self._operations.stand_ins, func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        # Code that asks for its type finds a float.
        return like_a_number(result) if func is torch.Tensor.item and is_number(result) else result
