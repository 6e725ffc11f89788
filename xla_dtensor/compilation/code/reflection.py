"""The attributes and parts of Python objects, read without running code of theirs."""

from __future__ import annotations

import abc
import contextlib
import functools
import gc
import types
from collections import deque
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from xla_dtensor.compilation.code.names import is_library, is_library_class, names_of

CACHED = type(functools.cache(lambda: None))
"""What ``functools.cache`` and ``lru_cache`` make of a function."""

_WALKED_APART = (
    *(dict, list, tuple, set, frozenset, deque),
    *(nn.Module, torch.Tensor, Optimizer, np.ndarray),  # ndarray: recarray has a __getattribute__
)


def is_strict(cls: type) -> bool:
    """Whether objects of a class decide themselves what their attributes are: they can't be asked
    with ``isinstance``, which asks for ``__class__``."""
    return type(cls.__getattribute__) is types.FunctionType and not issubclass(cls, _WALKED_APART)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of modules that hold the functions which their calls call."""

DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def slots_of(cls: type) -> list[str]:
    """The names of a class's own slots, as attributes."""
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    prefix = f"_{cls.__name__.lstrip('_')}"
    return [
        f"{prefix}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]


@functools.lru_cache(1024)
def all_slots_of(cls: Any) -> tuple[str, ...]:
    """The names of a class's slots, those of its base classes too; an exception's ``args`` and
    ``errno`` are some, in C."""
    own = [name for base in cls.__mro__ for name in slots_of(base)]
    if issubclass(cls, BaseException):
        members = (member for base in cls.__mro__ for member in vars(base).items())
        own += [n for n, m in members if isinstance(m, DESCRIPTORS) and not n.startswith("__")]
    return tuple(dict.fromkeys(own))


def is_callable(value: Any) -> bool:
    return callable(value) or isinstance(value, classmethod)


def code_of(method: Any) -> types.CodeType | None:
    """The code of what a class has under a name: a function, a property, one that is computed
    once."""
    for name in ("fget", "func", "wrapped", "__func__"):
        inner = getattr(method, name, None)
        if isinstance(inner, types.FunctionType):
            method = inner
    return method.__code__ if isinstance(method, types.FunctionType) else None


def inherited_names(cls: type) -> frozenset[str]:
    """The attributes named in what a class has from libraries' classes, whose code isn't followed:
    what an inherited ``forward`` reads of a module, and calls of it. (Of `nn.Module` and
    `Optimizer` themselves what they read is known.)"""
    codes = (
        code_of(member)
        for base in cls.__mro__
        if base not in _KNOWN and is_library_class(base)
        for name, member in vars(base).items()
        if name not in _ASIDE
    )
    return frozenset().union(*(names_of(code).attributes for code in codes if code is not None))


_KNOWN = (object, nn.Module, Optimizer)
# Methods that no ``forward`` calls, and that may read all attributes.
_ASIDE = frozenset(
    {
        *("__init__", "reset_parameters", "extra_repr", "__repr__", "__dir__"),
        *("__setstate__", "__getstate__", "_load_from_state_dict", "_save_to_state_dict"),
    }
)


def referent(proxy: Any) -> Any:
    """What a weak proxy stands for; None if that is gone."""
    try:
        return proxy.__sizeof__.__self__  # a method knows the object itself
    except ReferenceError:
        return None


def registered_with(cls: abc.ABCMeta) -> set[Any]:
    return abc._get_dump(cls)[0]  # type: ignore[attr-defined]


def subclasses(cls: type) -> list[Any]:
    """The abstract classes that are derived from a class."""
    found: list[Any] = []
    inner: Any
    for inner in type.__subclasses__(cls):
        found += [inner, *subclasses(inner)] if isinstance(inner, abc.ABCMeta) else []
    return found


def protocol_names(cls: type) -> set[str]:
    """What ``isinstance`` looks for in an object, if a class is a ``typing.Protocol``."""
    names: set[str] = set()
    for base in cls.__mro__:
        own = base.__dict__
        if own.get("_is_protocol") and not is_library(base.__module__):
            names |= {*own, *own.get("__annotations__", ())}
    return {n for n in names if not (n.startswith("_abc_") or n in _OF_PROTOCOLS)}


# The attributes of an empty protocol class.
_OF_PROTOCOLS = {*vars(type("_Empty", (Protocol,), {"__doc__": ""})), "__annotations__"}


def data_descriptors(cls: type) -> set[str]:
    """The attributes that a class has its objects keep elsewhere than in their dict: properties."""
    members = (member for base in cls.__mro__ for member in vars(base).items())
    return {name for name, value in members if hasattr(type(value), "__set__")}


def dict_of(value: Any) -> dict[str, Any] | None:
    """The object's own attributes, without asking its ``__getattr__``."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def own_of(value: Any) -> dict[str, Any]:
    """The object's own attributes, in slots too, without asking its ``__getattr__``."""
    own = dict_of(value) or {}
    slots: dict[str, Any] = {}
    for name in all_slots_of(type(value)):  # type: ignore[arg-type]
        with contextlib.suppress(AttributeError):  # not assigned
            slots[name] = object.__getattribute__(value, name)
    return slots | own if slots else own


def referents(value: Any) -> list[Any]:
    """What an object of C refers to: the dict of a view."""
    return gc.get_referents(value)


def cache_of(cached: Any) -> tuple[dict[Any, Any], list[Any]]:
    """What a function under ``functools.cache`` or ``lru_cache`` has kept: by key, as its C code
    holds it, and the keys and results themselves."""
    parts = gc.get_referents(cached)
    wrapped = cached.__wrapped__
    for i in reversed(range(1, len(parts))):
        if parts[i] is wrapped and type(parts[i - 1]) is dict:
            return parts[i - 1], [*parts[: i - 1], *parts[i - 1].values()]
    return {}, []


def drop_from_cache(cached: Any, wanted: set[int]) -> None:
    """Let a function under ``functools.cache`` forget the calls whose arguments or results refer to
    an object of these ids, and no others."""
    calls, parts = cache_of(cached)
    inner = parts[1 : len(parts) - len(calls)]  # of a bounded cache: key, result, class in turns
    results = dict(zip(map(id, inner[::3]), inner[1::3], strict=True))
    kept = {
        key: value
        for key, value in calls.items()
        if not _refers_to((key, results.get(id(key), value)), wanted)
    }
    if len(kept) < len(calls):
        calls.clear()
        calls.update(kept)


_LEADS_ELSEWHERE = (type, types.ModuleType, types.CodeType, types.FrameType)
_LARGE = 10_000


def _refers_to(value: Any, wanted: set[int]) -> bool:
    """Whether an object, or what it consists of, is one of these ids."""
    todo, seen = [value], set[int]()
    while todo and len(seen) < _LARGE:
        inner = todo.pop()
        if id(inner) in wanted:
            return True
        if id(inner) in seen or isinstance(inner, _LEADS_ELSEWHERE):
            continue
        seen.add(id(inner))
        if isinstance(inner, types.FunctionType):
            todo += [inner.__closure__, inner.__defaults__, inner.__kwdefaults__]
        else:
            todo += gc.get_referents(inner)
    return False


def is_users_cache(value: Any) -> bool:
    """Whether it is a function under ``functools.cache`` that no library has."""
    return type(value) is CACHED and not is_library(getattr(value, "__module__", None))
