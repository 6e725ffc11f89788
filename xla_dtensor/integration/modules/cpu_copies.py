"""``torch.jit.trace`` and ``torch.onnx.export`` of a module on the device: they get a CPU copy.

TorchScript's tracer turns sizes into tensors, also in the functions by which we find out what an
operation returns; and what it and ONNX write down is to run, or to be saved, where no xla device
is. tensorboard's ``add_graph`` traces, too. (``torch.export`` takes the module as it is.)
"""

from __future__ import annotations

import copy
import types
import warnings
from typing import Any, NoReturn

import torch
from torch import nn

from xla_dtensor.base import executor
from xla_dtensor.base.ours import is_ours
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.base.torch_private.attributes import buffers_of, parameters_of
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over


def install() -> None:
    """Once per process."""
    take_over(torch.jit.trace, _trace)
    take_over(torch.jit.trace_module, _trace)
    on_import("torch.onnx", lambda onnx: take_over(onnx.export, _export))


def _trace(original: Any, args: Any, kwargs: Any) -> Any:
    given = _on_cpu(args, kwargs)
    if given is None:
        return original(*args, **kwargs)
    warnings.warn(
        "torch.jit.trace of a module on xla: what is traced is a copy on the CPU, and the result "
        "has the copy's weights. It runs and is saved there; its .to('xla') runs on the devices. "
        "(To compile for them, xla_dtensor.compile(function).)",
        stacklevel=4,
    )
    with executor.running(_Refuses()):
        return original(*given[0], **given[1])


class _Refuses(executor.Executor):
    """Refuses operations on xla tensors that the traced code has from elsewhere: what we keep of
    calls would have the trace's sizes in it, and outlive it."""

    def __init__(self) -> None:
        self.routes = (self._refuse,)

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> NoReturn:
        raise UnsupportedOpError(
            f"{func} under torch.jit.trace: the code uses an xla tensor that is neither an example "
            "input nor the given module's; give the module itself (not a function that calls it), "
            "or move what the code uses to the CPU"
        )


def _export(original: Any, args: Any, kwargs: Any) -> Any:
    given = _on_cpu(args, kwargs)
    return original(*args, **kwargs) if given is None else original(*given[0], **given[1])


def _on_cpu(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments of a call with CPU copies of modules and tensors on xla; None if none is."""
    found: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if is_ours(value):
            return found.setdefault(id(value), _copy(value, "an example input"))
        owner = getattr(value, "__self__", None)  # of ``model.forward``
        if isinstance(owner, nn.Module) and isinstance(value, types.MethodType):
            module = copied(owner)
            return value if module is owner else types.MethodType(value.__func__, module)
        if not isinstance(value, nn.Module):
            return value
        memo = {
            id(tensor): _copy(tensor, f"{type(inner).__name__}.{name}")
            for inner in value.modules()
            for own in (parameters_of(inner), buffers_of(inner), vars(inner))
            for name, tensor in own.items()
            if is_ours(tensor)
        }
        found.update(memo)
        return copy.deepcopy(value, memo) if memo else value

    given: Any = pytree.tree_map(copied, (args, kwargs))
    return given if found else None


def _copy(tensor: Any, name: str) -> torch.Tensor:
    if tensor._form.is_sharded:
        raise UnsupportedOpError(
            f"{name} is sharded: torch.jit.trace and torch.onnx.export take a module whose tensors "
            "are whole; make the model anew on the CPU and load into it what "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)) gives"
        )
    result = tensor.detach().cpu()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(result, tensor.requires_grad)
    return result.requires_grad_(tensor.requires_grad)
