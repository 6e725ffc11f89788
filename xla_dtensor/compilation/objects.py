"""Objects that torch's pytree can't take apart: dataclasses, and what else a step makes.

They are taken apart into their attributes, so that a step may return them, leave them in an
attribute, or find its state in them: each call makes a new one of the same class around its
tensors, without calling ``__init__``.
"""

from __future__ import annotations

import dataclasses
import gc
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from xla_dtensor.compilation.garbage import NewObjects
from xla_dtensor.compilation.reflection import slots_of


class Opened:
    """An object by its attributes, in torch's pytree. Unflattening gives another object."""

    __slots__ = ("attributes", "cls")

    def __init__(self, cls: type, attributes: dict[str, Any]) -> None:
        self.cls, self.attributes = cls, attributes


def _flatten(opened: Opened) -> tuple[list[Any], Any]:
    return list(opened.attributes.values()), (opened.cls, tuple(opened.attributes))


def _unflatten(values: Any, context: Any) -> Any:
    cls, names = context
    made = cls.__new__(cls)
    own = getattr(made, "__dict__", None)
    for name, value in zip(names, values, strict=True):
        if own is None:
            object.__setattr__(made, name, value)
        else:
            own[name] = value
    return made


pytree.register_pytree_node(Opened, _flatten, _unflatten)

_KEPT = (torch.Tensor, nn.Module, Optimizer, type, types.ModuleType)


def _has_attributes(value: Any) -> bool:
    """Whether an object is made of its attributes: of a class with the usual ``__new__``."""
    cls = type(value)
    if cls.__new__ is not object.__new__ or isinstance(value, _KEPT) or hasattr(cls, "__del__"):
        return cls is types.SimpleNamespace
    return not cls.__module__.startswith("xla_dtensor.")


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object; None where they aren't all that it is."""
    own = getattr(value, "__dict__", None)
    slots = [s for base in type(value).__mro__ for s in slots_of(base)]
    if own is None:
        return {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return None if slots or not isinstance(own, dict) else dict(own)


def is_record(value: Any) -> bool:
    """Whether an object is its fields and no more: of a dataclass, or a ``SimpleNamespace``."""
    return type(value) is types.SimpleNamespace or (
        dataclasses.is_dataclass(value) and _has_attributes(value)
    )


def opened_record(value: Any) -> Any:
    """A state with the records in it opened."""
    if is_record(value):
        own = attributes_of(value)
        if own is not None:
            return Opened(type(value), {k: opened_record(v) for k, v in own.items()})
    if type(value) is dict:
        return {key: opened_record(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(opened_record, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(opened_record, value))
    return value


class MadeObjects:
    """The objects that a step has made, to be made again in each call.

    Args:
        new: the block in which the step ran.
    """

    def __init__(self, new: NewObjects) -> None:
        self._new = new
        self._made: set[int] | None = None

    def flatten(self, value: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
        """``pytree.tree_flatten``, with objects that the step has made opened.

        Args:
            is_leaf: what isn't taken apart.
        """
        seen: dict[int, int] = {}
        self._count(value, is_leaf, seen)
        # One that is there twice, or in itself, would come to be two.
        once = {key for key, count in seen.items() if count == 1}
        return pytree.tree_flatten(self._opened(value, is_leaf, once), is_leaf=is_leaf)

    def _count(self, value: Any, is_leaf: Any, seen: dict[int, int]) -> None:
        for leaf in pytree.tree_leaves(value, is_leaf=is_leaf):
            if not self._is_made(leaf):
                continue
            seen[id(leaf)] = seen.get(id(leaf), 0) + 1
            if seen[id(leaf)] == 1:
                for inner in (attributes_of(leaf) or {}).values():
                    self._count(inner, self._kept_or(is_leaf), seen)

    def _opened(self, value: Any, is_leaf: Any, once: set[int]) -> Any:
        def opened(leaf: Any) -> Any:
            if id(leaf) not in once:
                return leaf
            own = attributes_of(leaf)
            if own is None:
                return leaf
            inside = self._kept_or(is_leaf)
            return Opened(type(leaf), {k: self._opened(v, inside, once) for k, v in own.items()})

        if not once:
            return value
        return pytree.tree_map(opened, value, is_leaf=is_leaf)

    def _kept_or(self, is_leaf: Any) -> Callable[[Any], bool]:
        """What isn't taken apart inside of an object: a list that was there before the step."""

        def kept(value: Any) -> bool:
            if isinstance(value, list | dict) and gc.is_tracked(value):
                made = self._ids()
                if made is None or id(value) not in made:
                    return True
            return is_leaf is not None and is_leaf(value)

        return kept

    def _is_made(self, value: Any) -> bool:
        if not _has_attributes(value):
            return False
        made = self._ids()
        return made is not None and id(value) in made

    def _ids(self) -> set[int] | None:
        if self._made is None:
            self._made = self._new.made()
        return self._made
