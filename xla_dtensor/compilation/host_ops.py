"""What a compiled step may not do on the CPU: it would happen once, when the step is traced."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from xla_dtensor.compilation.trace import StepTrace
from xla_dtensor.device_tensor import XLATensor
from xla_dtensor.sharded_tensor import XLAShardedTensor


class HostOperations(TorchDispatchMode):
    """Watches operations on CPU tensors while a step is traced.

    Computing on them is fine (the result is constant, or read again in each call); drawing random
    numbers or writing to a tensor from outside of the step is not.
    """

    def __init__(self, trace: StepTrace) -> None:
        super().__init__()
        self._trace = trace
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [
            x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, torch.Tensor)
        ]
        if any(isinstance(x, XLAShardedTensor | XLATensor) for x in tensors):
            return func(*args, **kwargs)
        device = kwargs.get("device")
        on_host = device is None or torch.device(device).type == "cpu"
        if on_host and torch.Tag.nondeterministic_seeded in func.tags:
            self._trace.refuse(
                f"random numbers on the CPU ({func}; make them on device='xla'), which"
            )
        if func._schema.is_mutable:
            for x in tensors:
                if x.device.type == "cpu" and not self._is_new(x) and x is _written(func, args):
                    self._trace.refuse(
                        f"{func} on a CPU tensor {list(x.shape)} from outside of the step, which "
                        "would be written once, not in every call: it"
                    )
        result = func(*args, **kwargs)
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and not isinstance(x, XLAShardedTensor | XLATensor):
                self._made[id(x)] = weakref.ref(x)
        return result

    def _is_new(self, tensor: torch.Tensor) -> bool:
        reference = self._made.get(id(tensor))
        return reference is not None and reference() is tensor


def _written(func: Any, args: Any) -> Any:
    """The positional argument that ``func`` writes to."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return value
    return None
