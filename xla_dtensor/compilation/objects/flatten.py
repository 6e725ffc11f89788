"""Takes a step's results, and what it leaves in attributes, apart, so that each call rebuilds them.

Each call makes it anew around its own tensors: lists and dicts, and what else the step has made
(dataclasses and other objects, without calling ``__init__``; functions, iterators). One object that
is there twice is one in each call, and may be a part of itself.
"""

from __future__ import annotations

import dataclasses
import gc
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from xla_dtensor.compilation.code.garbage import NewObjects
from xla_dtensor.compilation.code.reflection import all_slots_of
from xla_dtensor.compilation.objects.array_views import (
    ARRAY_VIEW,
    TENSOR_VIEW,
    ArrayView,
    array_of,
    whole_of,
)
from xla_dtensor.compilation.objects.found import is_atom
from xla_dtensor.compilation.objects.kind import ObjectKind
from xla_dtensor.compilation.objects.kinds import (
    BUFFER,
    DATACLASS,
    OWN_KINDS,
    PLAIN_DICT,
    PLAIN_LIST,
    RECORD,
    REGISTERED,
    TAGGED,
    TUPLE,
    kind_of,
)
from xla_dtensor.compilation.objects.kinds_of_code import GENERATOR, ITERATOR, ITERATORS
from xla_dtensor.compilation.objects.places import Attributes

_OPENED = (TUPLE, PLAIN_LIST, PLAIN_DICT, REGISTERED)
_KEPT = (torch.Tensor, nn.Module, Optimizer, type, types.ModuleType)


class Tree:
    """How objects are made of others: nodes, which refer to nodes by number and to leaves by its
    complement.

    Attributes:
        nodes: of each its kind, what else makes it, and what it consists of.
        numbers: of each which of the step's objects it is: it may be in several trees.
        root: the whole.
    """

    __slots__ = ("nodes", "numbers", "root")

    def __init__(self) -> None:
        self.nodes: list[tuple[ObjectKind, Any, tuple[int, ...]]] = []
        self.numbers: list[int] = []
        self.root = 0

    def is_leaf(self) -> bool:
        """Whether it consists of one leaf."""
        return self.root < 0

    def build(self, leaves: list[Any], made: dict[int, Any]) -> Any:
        """The objects anew, around these leaves; ``made`` has those that other trees of one call
        have made, too."""
        return leaves[~self.root] if self.root < 0 else self._build(self.root, leaves, made)

    # No closure: one that calls itself would keep a call's results until the next collection.
    def _build(self, number: int, leaves: list[Any], made: dict[int, Any]) -> Any:
        if number < 0:
            return leaves[~number]
        if self.numbers[number] in made:
            return made[self.numbers[number]]
        kind, data, parts = self.nodes[number]
        needed = [self._build(part, leaves, made) for part in parts[: kind.needs]]
        made[self.numbers[number]] = found = kind.make(data, needed)
        if kind.needs is not None:
            rest = [self._build(part, leaves, made) for part in parts[kind.needs :]]
            kind.fill(found, data, needed + rest)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tree) or self.root != other.root:
            return False
        mine, theirs = (
            [(kind, kind.key(data), parts) for kind, data, parts in tree.nodes]
            for tree in (self, other)
        )
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]


class _Flat:
    """What is known while something is taken apart."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.leaves: list[Any] = []
        self.seen: dict[int, int] = {}

    def leaf(self, value: Any) -> int:
        """Another leaf; what stands for it in the tree."""
        self.leaves.append(value)
        return ~(len(self.leaves) - 1)


def is_record(value: Any) -> bool:
    """Whether an object is its fields and no more: of a dataclass, or a ``SimpleNamespace``."""
    return type(value) is types.SimpleNamespace or (
        dataclasses.is_dataclass(value) and _has_attributes(value)
    )


def _has_attributes(value: Any) -> bool:
    """Whether an object is made of its attributes: of a class with the usual ``__new__``."""
    cls = type(value)
    if cls.__new__ is not object.__new__ or isinstance(value, _KEPT) or hasattr(cls, "__del__"):
        return cls is types.SimpleNamespace
    return not cls.__module__.startswith("xla_dtensor.") and not _has_more(cls)


def _has_more(cls: Any) -> bool:
    """Whether an object of a class of C holds what no attribute shows: a compiled ``re.Pattern``,
    a lock."""
    words = 2 + len(all_slots_of(cls))  # of attributes, of weak references
    room = object.__basicsize__ + words * tuple.__itemsize__
    return cls.__itemsize__ > 0 or cls.__basicsize__ > room


class MadeObjects:
    """The objects that a step has made, to be made again in each call.

    Args:
        new: the block in which the step ran.
        kept: whether an object is one that was there before: an argument, a list outside.
        is_own: whether a tensor is one that the step has made.
        arrays: the arrays and tensors from outside that the step's own arrays may show.
    """

    def __init__(
        self,
        new: NewObjects,
        kept: Callable[[Any], bool],
        is_own: Callable[[Any], bool],
        arrays: list[Any],
    ) -> None:
        self._new, self._kept, self._is_own, self._arrays = new, kept, is_own, arrays
        self._made: set[int] | None = None
        self._asked = False
        # By id: the object's number, and the object, kept alive so that its id stays its own.
        self._known: dict[int, tuple[int, Any]] = {}

    def flatten(self, value: Any) -> tuple[list[Any], Tree]:
        """The leaves of what a step gives away, and how to make it of others."""
        flat = _Flat()
        flat.tree.root = self._take(value, flat)
        return flat.leaves, flat.tree

    def _take(self, value: Any, flat: _Flat) -> int:
        known = flat.seen.get(id(value))
        if known is not None:
            return known
        kind, nodes, whole = self._kind(value), flat.tree.nodes, None
        if kind is None:
            whole = array_of(value, self._arrays) if self._is_own(value) else None
            if whole is None:
                return flat.leaf(value)
            kind = TENSOR_VIEW
        elif (whole := whole_of(value, self._arrays)) is not None:
            kind = ARRAY_VIEW
        number = flat.seen[id(value)] = len(nodes)
        flat.tree.numbers.append(self._known.setdefault(id(value), (len(self._known), value))[0])
        if isinstance(kind, ArrayView):
            data, parts = kind.taken(value, whole)
        else:
            data, parts = kind.split(value)
        nodes.append((kind, data, ()))
        first = [flat.leaf(parts.pop(0))] if kind is TAGGED else []
        nodes[number] = kind, data, (*first, *(self._take(part, flat) for part in parts))
        return number

    def _kind(self, value: Any) -> ObjectKind | None:
        """How an object is taken apart; None for a leaf."""
        cls = type(value)
        kind = kind_of(value)
        if kind in OWN_KINDS:
            return kind
        if isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool):
            return None
        if issubclass(cls, torch.Tensor):
            return TAGGED if Attributes(value, "").content() and self._is_own(value) else None
        if self._kept(value) or (kind is None and is_atom(value)):
            return None
        if kind in _OPENED:
            return kind
        if issubclass(cls, np.ndarray | bytearray):
            return kind or BUFFER
        untracked = issubclass(cls, ITERATORS) and not gc.is_tracked(value)  # a range's
        if not untracked and not self._is_made(value):
            return None
        if cls is types.GeneratorType:
            return GENERATOR
        if issubclass(cls, ITERATORS):
            return ITERATOR
        if kind in (RECORD, DATACLASS) or (kind is None and cls is not types.FunctionType):
            return RECORD if _has_attributes(value) else None
        return kind

    def _is_made(self, value: Any) -> bool:
        if not self._asked:
            self._asked, self._made = True, self._new.made()
        return self._made is not None and id(value) in self._made
