"""Takes Python containers and objects apart, and rebuilds them around other parts.

A step's arguments are taken apart for the key of its programs, its results and what it leaves
somewhere to be made anew in each call. Each sort of object is an `ObjectKind`; what
has none is a leaf.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.optim import Optimizer

from xla_dtensor.base.numbers.counts import Counts
from xla_dtensor.base.numbers.row_counts import CountNode, is_count
from xla_dtensor.base.tables.keys import exact, freeze
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.compilation.code.reflection import all_slots_of, dict_of, is_strict, own_of
from xla_dtensor.compilation.objects.found import ATOMS, content_of, is_atom
from xla_dtensor.compilation.objects.kind import ObjectKind, Spot, attribute_spots, give, unplaced
from xla_dtensor.compilation.objects.kinds_of_code import (
    BUILTIN,
    CELL,
    FUNCTION,
    METHOD,
    PARTIAL,
    SLICE,
    STREAM,
    VIEW,
    VIEWS,
    IteratorArgument,
    is_its_code,
)
from xla_dtensor.compilation.objects.kinds_of_counts import COUNT, COUNTS
from xla_dtensor.compilation.objects.places import (
    MISSING,
    Attributes,
    Elements,
    Items,
    Place,
    Slots,
    class_of_content,
)


class _Sequence(ObjectKind):
    def split(self, value: Any) -> tuple[Any, list[Any]]:
        cls = type(value)
        parts = list(class_of_content(value).__iter__(value))
        own = own_of(value)
        more = getattr(value, "maxlen", None) if isinstance(value, deque) else None
        return (cls, more, len(parts), tuple(own)), [*parts, *own.values()]

    def spots(self, value: Any, path: str) -> list[Spot]:
        (_, _, count, names), _ = self.split(value)
        elements = Elements(value, path, guarded=False)
        return [(elements, i) for i in range(count)] + attribute_spots(value, names, path)

    def make(self, data: Any, parts: list[Any]) -> Any:
        cls, _, count, names = data
        if cls is torch.Size or hasattr(cls, "n_sequence_fields"):  # of C: torch.return_types
            return cls(parts[:count])
        content: Any = frozenset if issubclass(cls, frozenset) else tuple
        made = content.__new__(cls, parts[:count])
        give(made, names, parts[count:])
        return made


class _List(_Sequence):
    needs = 0

    def make(self, data: Any, parts: list[Any]) -> Any:
        cls, maxlen, _, _ = data
        made = cls.__new__(cls)
        if issubclass(cls, deque):
            deque.__init__(made, (), maxlen)
        return made

    def fill(self, made: Any, data: Any, parts: list[Any]) -> None:
        _, _, count, names = data
        content = class_of_content(made)
        add = content.update if content is set else content.extend
        add(made, parts[:count])
        give(made, names, parts[count:])


class _Dict(ObjectKind):
    """Keys that aren't compared by value (tensors) are parts, too."""

    needs = 0

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        cls = type(value)
        content = class_of_content(value)
        keys = tuple(content.keys(value))
        parts = list(content.values(value))
        if cls is dict and set(map(type, keys)) <= {str}:
            return (cls, keys, (), False), parts
        others = [key for key in keys if not is_atom(key)]
        known = tuple(key if is_atom(key) else MISSING for key in keys)
        own, has_factory = own_of(value), isinstance(value, defaultdict)
        more = list(own.values())
        if has_factory:
            more.append(value.default_factory)
        return (cls, known, tuple(own), has_factory), parts + others + more

    def key(self, data: Any) -> Any:
        cls, keys, names, has_factory = data
        if cls is dict and not names and set(map(type, keys)) <= {str}:
            return data
        return cls, tuple(map(exact, keys)), names, has_factory

    def spots(self, value: Any, path: str) -> list[Spot]:
        (_, keys, names, has_factory), _ = self.split(value)
        items = Items(value, path, guarded=False)
        found: list[Spot] = [(items, key) for key in class_of_content(value).keys(value)]
        found += [unplaced(f"a key of {path}") for key in keys if key is MISSING]
        found += attribute_spots(value, names, path)
        if has_factory:
            found.append((Slots(value, ("default_factory",), path), "default_factory"))
        return found

    def make(self, data: Any, parts: list[Any]) -> Any:
        return data[0].__new__(data[0])

    def fill(self, made: Any, data: Any, parts: list[Any]) -> None:
        _, keys, names, has_factory = data
        content = class_of_content(made)
        values, rest = parts[: len(keys)], parts[len(keys) :]
        others = iter(rest)
        for key, value in zip(keys, values, strict=True):
            content.__setitem__(made, next(others) if key is MISSING else key, value)
        rest = list(others)
        if has_factory:
            made.default_factory = rest.pop()
        give(made, names, rest)


class _Record(ObjectKind):
    """An object that is its attributes: of a dataclass, a ``SimpleNamespace``."""

    needs = 0

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        content = fields_of(value)
        return (type(value), tuple(content)), list(content.values())

    def spots(self, value: Any, path: str) -> list[Spot]:
        return attribute_spots(value, tuple(fields_of(value)), path)

    def make(self, data: Any, parts: list[Any]) -> Any:
        return data[0].__new__(data[0])

    def fill(self, made: Any, data: Any, parts: list[Any]) -> None:
        give(made, data[1], parts)


class _Registered(ObjectKind):
    """What users have told torch's pytree how to take apart."""

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        parts, context = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        return (type(value), context), list(parts)

    def key(self, data: Any) -> Any:
        cls, context = data
        try:
            hash(freeze(context))
        except TypeError:
            return cls, repr(context)
        return cls, freeze(context)

    def spots(self, value: Any, path: str) -> list[Spot]:
        return [unplaced(f"{path}[{i}]") for i in range(len(self.split(value)[1]))]

    def make(self, data: Any, parts: list[Any]) -> Any:
        return pytree.SUPPORTED_NODES[data[0]].unflatten_fn(parts, data[1])


class _Objects(ObjectKind):
    """An array of NumPy's that holds objects."""

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        return (type(value), value.shape), value.ravel().tolist()

    def spots(self, value: Any, path: str) -> list[Spot]:
        return [unplaced(f"{path}.flat[{i}]") for i in range(value.size)]

    def make(self, data: Any, parts: list[Any]) -> Any:
        made = np.empty(len(parts), dtype=object)
        for i, part in enumerate(parts):
            made[i] = part
        return made.reshape(data[1]).view(data[0])


class _Buffer(ObjectKind):
    """An array, or another buffer, of numbers: a copy in each call."""

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        return value.copy(), []

    def key(self, data: Any) -> Any:
        return content_of(data)

    def make(self, data: Any, parts: list[Any]) -> Any:
        return data.copy()


class _Tagged(ObjectKind):
    """A tensor that the step has made and given attributes: they are put on it in each call."""

    needs = 1

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        own = Attributes(value, "").content()
        return tuple(own), [value, *own.values()]

    def make(self, data: Any, parts: list[Any]) -> Any:
        return parts[0]

    def fill(self, made: Any, data: Any, parts: list[Any]) -> None:
        for name, value in zip(data, parts[1:], strict=True):
            setattr(made, name, value)


SEQUENCE, LIST, DICT, RECORD = _Sequence(), _List(), _Dict(), _Record()
DATACLASS = _Record(inputs=True)
REGISTERED, OBJECTS, TAGGED = _Registered(inputs=True), _Objects(), _Tagged()
BUFFER = _Buffer()
# The containers whose numbers may be inputs of the program.
TUPLE, PLAIN_LIST, PLAIN_DICT = _Sequence(inputs=True), _List(inputs=True), _Dict(inputs=True)

_LEAVES = (
    *(torch.Tensor, nn.Module, Optimizer, type, types.ModuleType, np.generic, str, bytes, range),
)


_NOT_BOUND = (type, types.ModuleType, types.NoneType)


# Of Python's own classes, of which torch's pytree knows some, too.
_OF_CLASS: dict[Any, ObjectKind] = {
    **dict.fromkeys((list, deque), PLAIN_LIST),
    **dict.fromkeys((dict, OrderedDict, defaultdict), PLAIN_DICT),
    tuple: TUPLE,
    torch.Size: SEQUENCE,  # pytree would rebuild it as a tuple
}
# Of these and what is derived from them; the first that fits counts.
_OF_SUBCLASSES: tuple[tuple[Any, ObjectKind | None], ...] = (
    (slice, SLICE),
    (ATOMS, None),
    ((list, deque, set), LIST),
    (dict, DICT),
    ((tuple, frozenset), SEQUENCE),
    (types.SimpleNamespace, DATACLASS),  # a state that is given to a step: its counts are inputs
    ((UserDict, BlockMask), RECORD),
    (types.CellType, CELL),
    (IteratorArgument, STREAM),
    (types.MethodType, METHOD),
    (functools.partial, PARTIAL),
    (tuple(VIEWS), VIEW),
)


@functools.lru_cache(4096)
def _kind_of_class(cls: Any) -> ObjectKind | None:
    if cls in _OWN:
        return _OWN[cls]
    if is_strict(cls) or issubclass(cls, _LEAVES):
        return None
    if cls in _OF_CLASS:
        return _OF_CLASS[cls]
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return TUPLE
    if cls in pytree.SUPPORTED_NODES:
        return REGISTERED
    for classes, kind in _OF_SUBCLASSES:
        if issubclass(cls, classes):
            return kind
    if issubclass(cls, tuple(_OF_ATTRIBUTES)):
        return DATACLASS
    return DATACLASS if dataclasses.is_dataclass(cls) else None


_OF_ATTRIBUTES: list[type] = []

# Classes of this package's own.
OWN_KINDS = [COUNT, COUNTS]
_OWN: dict[type, ObjectKind] = {CountNode: COUNT, Counts: COUNTS}


def own_class(cls: type, kind: ObjectKind) -> None:
    """Objects of a class of this package's own are taken apart so, tensors too."""
    _OWN[cls] = kind
    OWN_KINDS.append(kind)
    _kind_of_class.cache_clear()


def made_of_attributes(*classes: type) -> None:
    """Objects of these classes and of those derived from them are their attributes and no more:
    as arguments they are taken apart, as dataclasses are, rather than told by identity."""
    _OF_ATTRIBUTES.extend(classes)
    _kind_of_class.cache_clear()


def kind_of(value: Any) -> ObjectKind | None:
    """How ``value`` is taken apart as an argument; None for a leaf."""
    cls = type(value)
    kind = _kind_of_class(cls)  # type: ignore[arg-type]
    if kind is None:
        if cls in pytree.SUPPORTED_NODES:  # registered since `_kind_of_class` was cached
            return REGISTERED
        if cls is torch.SymInt and is_count(value):
            return COUNT
        if cls is types.FunctionType:
            return FUNCTION if is_its_code(value) else None
        if cls is types.BuiltinMethodType and not isinstance(value.__self__, _NOT_BOUND):
            return BUILTIN
        if issubclass(cls, np.ndarray) and value.dtype == object:
            return OBJECTS
    return kind


def ids_of_parts(value: Any) -> list[int]:
    """What tells whether an object still has the parts that it had."""
    kind = kind_of(value)
    return [] if kind is None else list(map(id, kind.split(value)[1]))


def fields_of(value: Any) -> dict[str, Any]:
    """The attributes of a record, by name."""
    own = own_of(value)
    if not dataclasses.is_dataclass(value):
        return own
    fields = {f.name: getattr(value, f.name, MISSING) for f in dataclasses.fields(value)}
    return {k: v for k, v in fields.items() if v is not MISSING} | own


def places_of(value: Any, path: str) -> list[Place]:
    """The places of an argument that a step may change: its elements, its attributes."""
    if isinstance(value, torch.Tensor):
        return [Attributes(value, path)]
    found: list[Place] = []
    if isinstance(value, list | deque | set):
        found.append(Elements(value, path, guarded=False))
    elif isinstance(value, dict):
        found.append(Items(value, path, guarded=False))
    elif isinstance(value, types.CellType):
        found.append(Slots(value, ("cell_contents",), path, shown=path, guarded=False))
    if dict_of(value) is not None and not isinstance(value, types.FunctionType):
        found.append(Attributes(value, path))
    names = all_slots_of(type(value))  # type: ignore[arg-type]
    if names and not isinstance(value, IteratorArgument):
        found.append(Slots(value, names, path, guarded=False))
    return found


def mapped(
    value: Any,
    leaf: Callable[[Any], Any],
    plant: Callable[[Place, Any, Any], None] | None,
    done: dict[int, Any],
) -> Any:
    """``value`` with ``leaf(x)`` for each leaf ``x``.

    Args:
        plant: puts something into a place; None to make new objects all the way.
        done: what has been mapped, by id.
    """
    kind = kind_of(value)
    if kind is None:
        return leaf(value)
    if id(value) in done:
        return done[id(value)][1]
    done[id(value)] = value, value
    data, parts = kind.split(value)
    new = [mapped(part, leaf, plant, done) for part in parts]
    changed = [i for i, (a, b) in enumerate(zip(parts, new, strict=True)) if a is not b]
    if not changed and kind is not STREAM:
        return value
    if plant is not None and kind.needs is not None and not isinstance(value, set):
        spots = kind.spots(value, "an argument")
        if all(spots[i][1] is not MISSING for i in changed):
            for i in changed:
                plant(*spots[i], new[i])
            return value
    made = kind.make(data, new[: kind.needs])
    if kind.needs is not None:
        kind.fill(made, data, new)
    done[id(value)] = value, made
    return made
