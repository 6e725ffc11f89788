"""What one call of a compiled step is given: the part that may vary, and a key of the rest."""

from __future__ import annotations

import dataclasses
import types
from collections import UserDict
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from xla_dtensor.compilation.code_names import is_library
from xla_dtensor.compilation.watch import content_of, is_atom, is_strict
from xla_dtensor.device_tensor import XLATensor
from xla_dtensor.sharded_tensor import XLAShardedTensor
from xla_dtensor.storage import exact


class Same:
    """A part of a key that is equal only to that of the same object, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


class Arguments:
    """The arguments of one call.

    Attributes:
        values: the leaves of ``(args, kwargs)``.
        tensors: the tensors among them and in dataclasses and the like; inputs of the program.
        numbers: the Python numbers (not bools) among the leaves, by position.
        objects: what is known by identity alone; the step's code may read from it.
        key: of everything but the numbers' values: calls with different keys have different
            programs.
    """

    __slots__ = ("_shape", "args", "key", "kwargs", "numbers", "objects", "tensors", "values")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        if not kwargs and all(map(_is_leaf, args)):
            self.values: list[Any] = list(args)
            self._shape: Any = len(args)
        else:
            self.values, self._shape = pytree.tree_flatten((args, kwargs))
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[int, int | float] = {}
        self.objects: list[tuple[str, Any]] = []
        parts: list[Any] = []
        for i, value in enumerate(self.values):
            cls = type(value)
            if cls is XLAShardedTensor or cls is XLATensor:
                parts.append(self._tensor(value))
            elif cls is float or cls is int:
                self.numbers[i] = value
                parts.append(cls)
            else:
                parts.append(self._part(value, f"argument {i}"))
        first: dict[int, int] = {}
        aliases: tuple[int, ...] = ()
        if len(self.tensors) > 1:
            # Which of them share memory: a write to one is a write to the other.
            aliases = tuple(
                first.setdefault(id(getattr(t, "_storage_", t)), i)
                for i, t in enumerate(self.tensors)
            )
        self.key = (self._shape, tuple(parts), aliases, global_state())

    def _tensor(self, value: Any) -> tuple[Any, ...]:
        self.tensors.append(value)
        hooks = value._backward_hooks
        return (
            value._form,
            value._storage_.form,
            value._steps,
            value.requires_grad,
            value.requires_grad and value.is_leaf,
            tuple(map(Same, hooks.values())) if hooks else None,
        )

    def _part(self, value: Any, path: str) -> Any:
        """The part of the key for one leaf, or for something inside of one."""
        if is_strict(type(value)):
            self.objects.append((path, value))
            return Same(value)
        if isinstance(value, XLAShardedTensor | XLATensor):
            return self._tensor(value)
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return (
                tuple(value.shape),
                value.stride(),
                value.dtype,
                value.device,
                value.requires_grad,
            )
        if is_atom(value):
            try:
                return exact(value)
            except TypeError:  # a slice
                return "atom", repr(value)
        if isinstance(value, np.ndarray | bytearray | memoryview):
            return content_of(value)
        if isinstance(value, set | frozenset) and all(map(is_atom, value)):
            return type(value), frozenset(map(exact, value))
        fields = _fields(value)
        if fields is None:
            if isinstance(value, dict):  # of a class that torch's pytree doesn't know
                self.objects.append((f"the class of {path}", type(value)))
                return type(value), tuple(
                    (self._part(k, path), self._part(x, f"{path}[{k!r}]")) for k, x in value.items()
                )
            if isinstance(value, list | tuple):
                self.objects.append((f"the class of {path}", type(value)))
                return type(value), tuple(
                    self._part(x, f"{path}[{i}]") for i, x in enumerate(value)
                )
            self.objects.append((path, value))
            return Same(value)
        self.objects.append((f"the class of {path}", type(value)))  # whose methods may be called
        return type(value), tuple(
            (name, self._part(inner, f"{path}.{name}")) for name, inner in fields.items()
        )

    # --- for the trace ------------------------------------------------------------------------

    def classes(self) -> list[tuple[str, Any]]:
        """The classes of the containers that torch's pytree has taken apart (named tuples), and the
        functions that they keep, whose code may be the step's."""
        found: dict[int, tuple[str, Any]] = {}
        specs = [] if isinstance(self._shape, int) else [self._shape]
        while specs:
            spec = specs.pop()
            specs += spec.children()
            context = spec.context if isinstance(spec.context, list | tuple) else [spec.context]
            for value in (spec.type, *context):
                if isinstance(value, type | types.FunctionType) and not is_library(
                    value.__module__
                ):
                    found[id(value)] = f"the class of an argument, {value.__qualname__}", value
        return list(found.values())

    def with_numbers(self, numbers: dict[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other numbers in the places of ``numbers``."""
        if not numbers:
            return self.args, self.kwargs
        values = [numbers.get(i, value) for i, value in enumerate(self.values)]
        if isinstance(self._shape, int):
            return tuple(values), {}
        args, kwargs = pytree.tree_unflatten(values, self._shape)
        return args, kwargs

    def without_history(self) -> Arguments:
        """The same for a trace: a tensor that has a history is a leaf there, with the same memory.
        torch's backward pass would go on into what the caller has computed."""
        if not any(_has_history(t) for t in self.tensors):
            return self

        def cut(value: Any) -> Any:
            return value.detach().requires_grad_() if _has_history(value) else value

        args, kwargs = pytree.tree_map(cut, (self.args, self.kwargs))
        return Arguments(args, kwargs)

    def changed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the step, given these, has put other things into its lists and dicts."""
        if isinstance(self._shape, int):
            return False
        values, shape = pytree.tree_flatten((args, kwargs))
        return shape != self._shape or any(
            a is not b
            for i, (a, b) in enumerate(zip(values, self.values, strict=True))
            if i not in self.numbers
        )

    # --- for messages -------------------------------------------------------------------------

    def names(self) -> list[str]:
        """How to call the leaves."""
        tree = (self.args, self.kwargs)
        return [_path_name(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]

    def difference(self, other: Arguments) -> str | None:
        """What differs from another call, in words; None if nothing but numbers does."""
        if self._shape != other._shape:
            return "the arguments have another structure"
        for name, mine, theirs, now, before in zip(
            self.names(), self.key[1], other.key[1], self.values, other.values, strict=True
        ):
            if mine != theirs:
                return f"{name}: from {_text(before)} to {_text(now)}"
        if self.key[2] != other.key[2]:
            return "which of the arguments share memory"
        if self.key[3] != other.key[3]:
            for name, now, before in zip(_STATE, self.key[3], other.key[3], strict=True):
                if now != before:
                    return f"{name}: from {before} to {now}"
        return None


def _has_history(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf


def _is_leaf(value: Any) -> bool:
    return issubclass(type(value), _LEAVES)


_LEAVES = (torch.Tensor, int, float, str, types.NoneType)


def _fields(value: Any) -> dict[str, Any] | None:
    """The content of an object that is a value (two with the same content are as good as one), or
    None for an object that is known by identity."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        return fields | getattr(value, "__dict__", {})
    if isinstance(value, types.SimpleNamespace | UserDict):
        return dict(vars(value))
    return None


def _path_name(path: Any) -> str:
    """``([0], [1])`` of ``(args, kwargs)`` as a user would say it."""
    kind, *rest = path
    where = "".join(str(part) for part in rest)
    return f"argument {where}" if getattr(kind, "idx", 0) == 0 else f"argument keyword {where}"


def _text(value: Any) -> str:
    """An argument, in words."""
    if isinstance(value, XLAShardedTensor | XLATensor):
        form = value._form
        text = f"{list(form.shape)} {form.dtype}"
        if form.placements is not None:
            text += f" {list(form.placements)}"
        return text + (", requires_grad" if value.requires_grad else "")
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {value.dtype} on {value.device}"
    text = repr(value)
    return text if len(text) < 100 else f"{text[:97]}..."


_STATE = (
    *("torch.is_grad_enabled()", "torch.is_inference_mode_enabled()", "torch.get_default_dtype()"),
    *("torch.get_float32_matmul_precision()", "torch.are_deterministic_algorithms_enabled()"),
    *("torch.is_anomaly_enabled()", "torch.is_anomaly_check_nan_enabled()"),
    *("autocast on xla", "autocast on the CPU", "autocast's dtype on xla", "its dtype on the CPU"),
    *("torch.get_default_device()", "saved-tensor hooks", "torch's modes", "__torch_function__"),
)


def global_state() -> tuple[Any, ...]:
    """torch's settings of this moment that change what a step computes."""
    on_xla, on_cpu = torch.is_autocast_enabled("xla"), torch.is_autocast_enabled("cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        on_xla,
        on_cpu,
        torch.get_autocast_dtype("xla") if on_xla else None,
        torch.get_autocast_dtype("cpu") if on_cpu else None,
        getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        _modes() if _function_modes() or _dispatch_modes() else None,
        torch._C._is_torch_function_enabled(),
    )


_function_modes, _dispatch_modes = (
    torch._C._len_torch_function_stack,
    torch._C._len_torch_dispatch_stack,
)


def _modes() -> tuple[Same, ...]:
    """The modes that the user has entered: they see every operation."""
    functions = map(torch._C._get_function_stack_at, range(_function_modes()))
    dispatches = map(torch._C._get_dispatch_stack_at, range(_dispatch_modes()))
    return tuple(map(Same, (*functions, *dispatches)))
