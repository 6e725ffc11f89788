"""What one call of a compiled step is given: the part that may vary, and a key of the rest."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from xla_dtensor.base import sequence_order
from xla_dtensor.base.keys import exact
from xla_dtensor.base.python_numbers import NUMPY_NUMBERS
from xla_dtensor.compilation.buckets import Length, Padding
from xla_dtensor.compilation.carried import Carried, has_history, is_state
from xla_dtensor.compilation.code_names import is_library
from xla_dtensor.compilation.contents import Same, cells_of, fields_of, without_cells
from xla_dtensor.compilation.fields import NumberFields
from xla_dtensor.compilation.found import content_of, is_atom
from xla_dtensor.compilation.objects import opened_record
from xla_dtensor.compilation.outside import hooks_of
from xla_dtensor.compilation.reflection import is_strict
from xla_dtensor.mesh import current_mesh
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor


class Arguments:
    """The arguments of one call.

    Attributes:
        values: the leaves of ``(args, kwargs)``.
        tensors: the tensors among them and in dataclasses and the like; inputs of the program.
        numbers: the numbers (not bools) among the leaves, by position, and below 0 those in
            attributes of dataclasses.
        fields: of the latter, where they are.
        objects: what is known by identity alone; the step's code may read from it.
        key: of everything but the numbers' values: calls with different keys have different
            programs.
        carried: the same of what the step has kept from its last call (`carrying`), which comes
            behind the arguments.
        given: the arguments alone.
        padding: what has been padded of them (`buckets.Padding`), or None.
        lengths: the numbers that are the lengths of what has been, by position.
    """

    __slots__ = (
        *(
            "_carried_names",
            "_opened",
            "_shape",
            "args",
            "carried",
            "given",
            "key",
            "kwargs",
            "numbers",
        ),
        *("fields", "lengths", "objects", "padding", "tensors", "values"),
    )

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        if not kwargs and all(map(_is_leaf, args)):
            self.values: list[Any] = list(args)
            self._shape: Any = len(args)
        else:
            self.values, self._shape = pytree.tree_flatten((args, kwargs))
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[int, int | float] = {}
        self.fields = NumberFields()
        self.objects: list[tuple[str, Any]] = []
        self._opened: set[int] = set()
        self.padding: Padding | None = None
        self.lengths: frozenset[int] = frozenset()
        parts: list[Any] = []
        for i, value in enumerate(self.values):
            cls = type(value)
            if cls is XLAShardedTensor or cls is XLATensor:
                parts.append(self._tensor(value))
            elif cls is float or cls is int or cls in NUMPY_NUMBERS:
                self.numbers[i] = value
                parts.append(cls)
            elif cls is Length:
                self.numbers[i] = self.values[i] = int(value)
                self.lengths |= {i}
                parts.append(cls)
            else:
                parts.append(self._part(value, f"argument {i}"))
        self.key = (self._shape, tuple(parts), self._aliases(), global_state())
        self.given = self
        self.carried: tuple[Any, ...] = ()
        self._carried_names: list[str] = []

    def _aliases(self) -> tuple[int, ...]:
        """Which of the tensors share memory: a write to one is a write to the other."""
        if len(self.tensors) < 2:
            return ()
        first: dict[int, int] = {}
        return tuple(
            first.setdefault(id(getattr(t, "_storage_", t)), i) for i, t in enumerate(self.tensors)
        )

    def _tensor(self, value: Any) -> tuple[Any, ...]:
        self.tensors.append(value)
        hooks = value._backward_hooks
        return (
            value._form,
            value._storage_.form,
            value._steps,
            value.requires_grad,
            value.requires_grad and value.is_leaf,
            tuple(map(Same, hooks_of(value))) if hooks else (),
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
        fields = fields_of(value)
        if fields is None:
            cells = None if id(value) in self._opened else cells_of(value)
            if cells is not None:
                self._opened.add(id(value))  # it may keep itself
                self.objects.append((path, without_cells(value)))
                return (
                    Same(value.__globals__),
                    value.__code__,
                    tuple(self._part(inner, f"{name} of {path}") for name, inner in cells.items()),
                )
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
        return type(value), *self.fields.part(value, fields, path, self)

    # --- what the step keeps ------------------------------------------------------------------

    def carrying(self, places: Sequence[Carried]) -> Arguments | None:
        """These, and behind them what is in ``places`` now; None if it can't be an argument."""
        given = self.given
        if not places:
            return given
        more = Arguments.__new__(Arguments)
        more.given, more._shape = given, given._shape
        more.fields = given.fields
        more.args, more.kwargs, more.objects = given.args, given.kwargs, given.objects
        more.key, more.padding, more.lengths = given.key, given.padding, given.lengths
        more._opened = set()
        more.values, more.tensors = list(given.values), list(given.tensors)
        more.numbers, more._carried_names = dict(given.numbers), []
        parts = []
        for place in places:
            value = place.read()
            if not is_state(value):
                return None
            parts.append(more._state(value, place.name))
        more.carried = (*parts, more._aliases())
        return more

    def _state(self, value: Any, name: str) -> Any:
        """The part of the key for what is in one place."""
        if isinstance(value, torch.Tensor | int | float | str | None):
            return self._state_leaf(value, name)
        leaves, shape = pytree.tree_flatten(opened_record(value))
        return shape, tuple(self._state_leaf(leaf, name) for leaf in leaves)

    def _state_leaf(self, value: Any, name: str) -> Any:
        cls = type(value)
        position = len(self.values)
        self.values.append(value)
        self._carried_names.append(name)
        if cls is float or cls is int:
            self.numbers[position] = value
            return cls
        return self._part(value, name)

    def carried_numbers(self) -> frozenset[int]:
        """The numbers that are kept. They are always inputs: they hardly stay as they are."""
        own = len(self.values) - len(self._carried_names)
        return frozenset(i for i in self.numbers if i >= own)

    def with_carried_numbers(
        self, places: Sequence[Carried], numbers: dict[int, Any]
    ) -> list[tuple[Carried, Any]]:
        """The places that hold numbers, each with its content with others instead."""
        position = len(self.values) - len(self._carried_names)
        found = []
        for place in places:
            leaves, shape = pytree.tree_flatten(opened_record(place.read()))
            inner = range(position, position + len(leaves))
            position += len(leaves)
            if any(i in numbers for i in inner):
                leaves = [numbers.get(i, leaf) for i, leaf in zip(inner, leaves, strict=True)]
                found.append((place, pytree.tree_unflatten(leaves, shape)))
        return found

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
        own = len(self.values) - len(self._carried_names)
        values = [numbers.get(i, value) for i, value in enumerate(self.values[:own])]
        if isinstance(self._shape, int):
            return tuple(values), {}
        args, kwargs = pytree.tree_unflatten(values, self._shape)
        return args, kwargs

    def without_history(self) -> Arguments:
        """The same for a trace: a tensor that has a history is a leaf there, with the same memory.
        torch's backward pass would go on into what the caller has computed."""
        if not any(map(has_history, self.tensors)):
            return self

        def cut(value: Any) -> Any:
            return value.detach().requires_grad_() if _is_computed(value) else value

        args, kwargs = pytree.tree_map(cut, (self.args, self.kwargs))
        return Arguments(args, kwargs)

    def changed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the step, given these, has put other things into its lists and dicts."""
        if isinstance(self._shape, int):
            return False
        values, shape = pytree.tree_flatten((args, kwargs))
        return shape != self._shape or any(
            a is not b
            for i, (a, b) in enumerate(zip(values, self.values, strict=False))
            if i not in self.numbers
        )

    # --- for messages -------------------------------------------------------------------------

    def names(self) -> list[str]:
        """How to call the leaves."""
        tree = (self.args, self.kwargs)
        own = [_path_name(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
        return own + self._carried_names

    def names_of_numbers(self) -> dict[int, str]:
        """How to call the numbers, by position."""
        names = self.names()
        return {i: self.fields.name(i) if i < 0 else names[i] for i in self.numbers}

    def difference(self, other: Arguments) -> str | None:
        """What differs from another call, in words; None if nothing but numbers does."""
        if self._shape != other._shape:
            return "the arguments have another structure"
        for name, mine, theirs, now, before in zip(
            self.names(), self.key[1], other.key[1], self.values, other.values, strict=False
        ):
            if mine != theirs:
                return f"{name}: from {_text(before)} to {_text(now)}"
        if self.key[2] != other.key[2]:
            return "which of the arguments share memory"
        if self.key[3] != other.key[3]:
            for name, now, before in zip(_STATE, self.key[3], other.key[3], strict=True):
                if now != before:
                    return f"{name}: from {before} to {now}"
        if self.carried != other.carried:
            now, before = self.values[len(self.key[1]) :], other.values[len(self.key[1]) :]
            for name, mine, theirs in zip(self._carried_names, now, before, strict=False):
                if _text(mine) != _text(theirs):
                    return f"{name}: from {_text(theirs)} to {_text(mine)}"
            return "what the step keeps from one call to the next"
        return None


def _is_computed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and has_history(value)


def _is_leaf(value: Any) -> bool:
    return issubclass(type(value), _LEAVES)


_LEAVES = (torch.Tensor, int, float, str, types.NoneType)


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
    *("the order of sequences in context_parallel", "the current mesh"),
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
        sequence_order.current(),
        current_mesh(),
    )


_function_modes, _dispatch_modes = (
    torch._C._len_torch_function_stack,
    torch._C._len_torch_dispatch_stack,
)


def _modes() -> tuple[Same, ...]:
    """The modes that the user has entered: they see every operation."""
    return tuple(Same(mode) for _, mode in active_modes())


def active_modes() -> list[tuple[str, Any]]:
    """The modes that are entered, with how to call them."""
    functions = map(torch._C._get_function_stack_at, range(_function_modes()))
    dispatches = map(torch._C._get_dispatch_stack_at, range(_dispatch_modes()))
    return [(f"the mode {type(m).__name__}", m) for m in (*functions, *dispatches)]
