"""What one call of a compiled step is given: the part that may vary, and a key of the rest."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from xla_dtensor.device_tensor import XLATensor
from xla_dtensor.sharded_tensor import XLAShardedTensor
from xla_dtensor.storage import exact


class Arguments:
    """The arguments of one call: tensors, static values, and a key of everything static."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        leaves, self.tree = pytree.tree_flatten((args, kwargs))
        self.values = leaves
        self.tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        self.described = [_describe(x) for x in leaves]
        self.key = (self.tree, tuple(d[0] for d in self.described), _global_state())

    def difference(self, other: Arguments) -> str:
        """What differs from another call, in words."""
        if len(self.described) != len(other.described) or self.tree != other.tree:
            return "the arguments have another structure"
        names = [path for path, _ in pytree.tree_flatten_with_path(self.unflatten())[0]]
        for path, mine, theirs in zip(names, self.described, other.described, strict=True):
            if mine[0] != theirs[0]:
                return f"argument {_path_name(path)}: from {theirs[1]} to {mine[1]}"
        return f"torch's global state: from {other.key[2]} to {self.key[2]}"

    def unflatten(self) -> Any:
        return pytree.tree_unflatten(self.values, self.tree)


def _path_name(path: Any) -> str:
    """``([0], [1])`` of ``(args, kwargs)`` as a user would say it."""
    kind, *rest = path
    where = "".join(str(part) for part in rest)
    return where if getattr(kind, "idx", 0) == 0 else f"keyword {where}"


def _describe(value: Any) -> tuple[Any, str]:
    """A hashable description of an argument, and the same for a person."""
    if isinstance(value, XLAShardedTensor | XLATensor):
        form = value._form
        text = f"{list(form.shape)} {form.dtype}"
        if form.placements is not None:
            text += f" {list(form.placements)}"
        return (form, value._storage_.form, value._steps, value.requires_grad), text
    if isinstance(value, torch.Tensor):
        key = (tuple(value.shape), value.dtype, value.device.type, value.requires_grad)
        return key, f"{list(value.shape)} {value.dtype} on {value.device}"
    try:
        hash(value)
    except TypeError:
        return (type(value), id(value)), repr(value)
    return exact(value), repr(value)


def _global_state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("xla"),
        torch.get_autocast_dtype("xla") if torch.is_autocast_enabled("xla") else None,
    )


def modules_of(function: Any, arguments: Arguments) -> list[nn.Module]:
    """The modules that the step can reach by name: their train/eval mode is part of the program."""
    found: list[Any] = [x for x in arguments.values if isinstance(x, nn.Module)]
    if isinstance(function, types.MethodType):
        found.append(function.__self__)
        function = function.__func__
    if isinstance(function, nn.Module):
        found.append(function)
    if isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            try:
                found.append(cell.cell_contents)
            except ValueError:  # a name that is not assigned yet
                continue
        found += [
            function.__globals__[name]
            for name in function.__code__.co_names
            if name in function.__globals__
        ]
    modules = [m for m in found if isinstance(m, nn.Module)]
    for owner in found:
        if not isinstance(owner, nn.Module | type) and hasattr(owner, "__dict__"):
            modules += [v for v in vars(owner).values() if isinstance(v, nn.Module)]
    return list({id(m): m for root in modules for m in root.modules()}.values())


def training_flags(modules: list[nn.Module]) -> list[bool]:
    """The modules' train/eval mode."""
    return [m.training for m in modules]
