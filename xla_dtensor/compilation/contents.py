"""When two objects among the arguments of a step are the same to it: one object, or two with the
same content."""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import types
import weakref
from collections import UserDict
from collections.abc import Callable
from typing import Any

from torch.nn.attention.flex_attention import BlockMask


class Same:
    """A part of a key that is equal only to that of the same object. It doesn't keep the object
    alive, if that can be referred to weakly: what is gone is equal to nothing."""

    __slots__ = ("_hash", "_object")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._object: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._object = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return False
        value = self._object()
        return value is not None and value is other._object()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self._object())


def fields_of(value: Any) -> dict[str, Any] | None:
    """The content of an object that is a value, by name; None for an object that is known by
    identity."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        return fields | getattr(value, "__dict__", {})
    if isinstance(value, types.SimpleNamespace | UserDict | BlockMask):
        return dict(vars(value))
    return None


def cells_of(value: Any) -> dict[str, Any] | None:
    """What a function made by another one keeps, by name; None where that isn't all that it is.

    Such functions are made anew for each batch (the mask modifiers of flex_attention, which keep
    its positions): of the same code and around tensors of the same form they have one program.
    """
    if not isinstance(value, types.FunctionType) or value.__dict__:
        return None
    code = value.__code__
    if not code.co_flags & inspect.CO_NESTED or _writes_cells(code):
        return None
    kept: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
        try:
            kept[name] = cell.cell_contents
        except ValueError:  # it isn't there yet
            return None
    defaults = enumerate(value.__defaults__ or ())
    return (
        kept | {f"default {i}": default for i, default in defaults} | (value.__kwdefaults__ or {})
    )


def without_cells(function: types.FunctionType) -> types.FunctionType:
    """The same code with nothing in its variables: they are the next call's others."""
    empty = tuple(types.CellType() for _ in function.__code__.co_freevars)
    name = function.__name__
    return types.FunctionType(function.__code__, function.__globals__, name, None, empty)


@functools.lru_cache(1024)
def _writes_cells(code: types.CodeType) -> bool:
    """Whether a function, or one inside of it, assigns to variables of the one around it."""
    free = set(code.co_freevars)
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in free:
            return True
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return any(map(_writes_cells, inner))
