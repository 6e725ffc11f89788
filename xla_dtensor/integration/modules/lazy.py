"""Lazy modules on "xla" (``nn.LazyLinear``): parameters whose shape the first batch gives.

Until then torch keeps an empty tensor on the device that it is going to be on. A tensor of another
type can't become one of ours in place, so theirs stays on the CPU with a mark, and is swapped for
one on the device once it has a shape.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import (
    UninitializedBuffer,
    UninitializedParameter,
    UninitializedTensorMixin,
    is_lazy,
)

from xla_dtensor.base.torch_private.attributes import buffers_of, parameters_of

_MARK = "_xla_dtensor_waits"


def install() -> None:
    """Hook where torch makes, moves and materializes them."""
    mixin: Any = UninitializedTensorMixin
    mixin.materialize = _materializing(mixin.materialize)
    for cls in (UninitializedParameter, UninitializedBuffer):
        hooked: Any = cls
        hooked.__new__ = staticmethod(_making(cls.__new__))
        if "__deepcopy__" in vars(cls):
            hooked.__deepcopy__ = _copying(vars(cls)["__deepcopy__"])


def set_aside(module: nn.Module, move: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Take the uninitialized tensors that are, or are going to be, on "xla" out of a module that
    ``move`` is to be applied to, which they have been told of; by dict and name."""
    found = [
        (own, name, tensor, move(torch.empty(0, dtype=tensor.data.dtype, device="cpu")))
        for own in (parameters_of(module), buffers_of(module))
        for name, tensor in own.items()
        if is_lazy(tensor)
    ]
    taken: dict[str, Any] = {}
    for own, name, tensor, moved in found:
        to_xla = moved.device.type == "xla"
        if to_xla or getattr(tensor, _MARK, False):
            setattr(tensor, _MARK, to_xla or _keeps_device(move))
            tensor.data = torch.empty(0, dtype=moved.dtype, device="cpu")
            taken[name] = own, tensor
            # `_apply` passes over None; it would put the empty tensor on the device.
            own[name] = None
    return taken


def put_back(taken: dict[str, Any]) -> None:
    """Put them where they were."""
    for name, (own, tensor) in taken.items():
        own[name] = tensor


def _keeps_device(move: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether ``move`` changes the dtype alone: what is on "xla" it leaves there."""
    return move(torch.empty(0, device="xla")).device.type == "xla"


def _is_xla(device: Any) -> bool:
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "xla":
        from xla_dtensor.dispatch import refuse_other_device

        refuse_other_device("a lazy module", device)
    return device.type == "xla"


def _making(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(cls, *args, **kwargs)
        if not _is_xla(bound.arguments.get("device")):
            return original(cls, *args, **kwargs)
        bound.arguments["device"] = "cpu"
        made = original(*bound.args, **bound.kwargs)
        setattr(made, _MARK, True)
        return made

    return make


def _copying(original: Any) -> Any:
    @functools.wraps(original)
    def copy(self: Any, memo: Any) -> Any:
        result = original(self, memo)
        if getattr(self, _MARK, False):
            setattr(result, _MARK, True)
        return result

    return copy


def _materializing(original: Any) -> Any:
    @functools.wraps(original)
    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        waits = getattr(self, _MARK, False) if device is None else _is_xla(device)
        if not waits:
            original(self, shape, device, dtype)
            return
        original(self, shape, "cpu", dtype)
        vars(self).pop(_MARK, None)
        on_device: Any = torch.empty(shape, dtype=self.dtype, device="xla")
        if isinstance(self, nn.Parameter):
            on_device = nn.Parameter(on_device, self.requires_grad)
        torch.utils.swap_tensors(self, on_device)

    return materialize
