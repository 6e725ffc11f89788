"""Places: containers outside of a step that its Python reads (dicts, lists, cells, attributes).

A place knows its content, can tell what changed in it, and can put a content back.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from xla_dtensor.compilation.code.reflection import dict_of
from xla_dtensor.tensors.attributes import OWN_ATTRIBUTES


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()
"""Stands for the value of a name that isn't there."""
UNREAD: Any = object()
"""Stands for the value of an attribute that the step's code doesn't read."""


Pairs = list[tuple[Callable[..., Any], Any]]
Live = tuple[list[Iterable[Any]], Pairs]


class Place:
    """One container.

    Attributes:
        path: its name in messages.
        guarded: whether its content is compared before each call. Of attributes that the step only
            assigns, only the change matters.
    """

    __slots__ = ("guarded", "owner", "path")

    def __init__(self, owner: Any, path: str, guarded: bool = True) -> None:
        self.owner = owner
        self.path = path
        self.guarded = guarded

    @property
    def container(self) -> int:
        """What is equal for two places of one container."""
        return id(self.owner)

    def content(self) -> dict[Any, Any]:
        """What it holds now, by key."""
        raise NotImplementedError

    def replace(self, content: dict[Any, Any]) -> None:
        """Let it hold ``content``, as `content` gave it."""
        raise NotImplementedError

    def put(self, changes: dict[Any, Any]) -> None:
        """Let it hold ``changes``, and what else it holds."""
        self.replace(changes)

    def at(self, key: Any) -> Any:
        """What it holds now under ``key``."""
        return self.content().get(key, MISSING)

    def label(self, key: Any) -> str:
        """The name in messages of what it holds under ``key``."""
        return f"{self.path}.{key}"

    def live(self) -> Live:
        """What gives the values again and again: iterables, and (function, argument) pairs whose
        result is one. All of them together are compared in one loop in C."""
        return [], []

    def sized(self) -> Any:
        """What tells by its length whether a name has been added; None if `live` shows that."""
        return None

    def is_empty(self) -> bool:
        """Whether there is nothing in it, which is quicker to ask than what is: most of a module's
        dicts of hooks."""
        return False


class Chosen(Place):
    """Some of what a container holds, by names.

    Attributes:
        keys: the names.
    """

    __slots__ = ("keys",)

    def __init__(self, owner: Any, keys: Iterable[str], path: str, guarded: bool = True) -> None:
        # Without super().__init__(), which costs: a walk makes thousands of these.
        self.owner, self.keys, self.path, self.guarded = owner, tuple(keys), path, guarded

    def only(self, keys: Iterable[str], guarded: bool = True) -> Chosen:
        """Others in the same container."""
        other = copy.copy(self)
        other.keys, other.guarded = tuple(keys), guarded
        return other


class Entries(Chosen):
    """Chosen keys of a mapping: attributes of an object (its ``__dict__``), globals, a class."""

    __slots__ = ("grows", "setter")

    def __init__(
        self,
        owner: Mapping[str, Any],
        keys: Iterable[str],
        path: str,
        guarded: bool = True,
        setter: Any = None,
        grows: bool = True,
    ) -> None:
        super().__init__(owner, keys, path, guarded)
        self.setter = setter
        self.grows = grows

    @property
    def container(self) -> int:
        return id(self.owner if self.setter is None else self.setter)

    def content(self) -> dict[Any, Any]:
        found = map(self.owner.get, self.keys, itertools.repeat(MISSING))
        return dict(zip(self.keys, found, strict=True))

    def at(self, key: Any) -> Any:
        return self.owner.get(key, MISSING)

    def replace(self, content: dict[Any, Any]) -> None:
        for key, value in content.items():
            if self.owner.get(key, MISSING) is value:
                continue
            if self.setter is not None:  # a class, whose mappingproxy can't be written
                delattr(self.setter, key) if value is MISSING else setattr(self.setter, key, value)
            elif value is MISSING:
                del self.owner[key]
            else:
                self.owner[key] = value

    def label(self, key: Any) -> str:
        return f"{self.path}.{key}" if self.path else str(key)

    def live(self) -> Live:
        present = [key for key in self.keys if key in self.owner]
        return [], _together(operator.itemgetter, present, self.owner)

    def sized(self) -> Any:
        return self.owner if self.grows else None


class Slots(Chosen):
    """Attributes that are in no ``__dict__``: a closure's cell, ``__slots__``, a function's
    defaults."""

    __slots__ = ("shown",)

    def __init__(
        self,
        owner: Any,
        keys: Iterable[str],
        path: str,
        shown: str | None = None,
        guarded: bool = True,
    ) -> None:
        super().__init__(owner, keys, path, guarded)
        self.shown = shown

    def content(self) -> dict[Any, Any]:
        found = {}
        for name in self.keys:
            try:
                found[name] = getattr(self.owner, name)
            except (AttributeError, ValueError):  # not assigned yet
                found[name] = MISSING
        return found

    def replace(self, content: dict[Any, Any]) -> None:
        # A frozen dataclass would refuse it, and other classes' own methods would do more.
        how: Any = type if isinstance(self.owner, type) else object
        for name, value in content.items():
            if value is MISSING:
                if self.content()[name] is not MISSING:
                    how.__delattr__(self.owner, name)
            else:
                how.__setattr__(self.owner, name, value)

    def label(self, key: Any) -> str:
        return self.shown if self.shown is not None else f"{self.path}.{key}"

    def live(self) -> Live:
        if any(value is MISSING for value in self.content().values()):  # until it is assigned
            return [], [(lambda owner: self.content().values(), self.owner)]
        return [], _together(operator.attrgetter, self.keys, self.owner)


# Their length is asked for by the base class, as a user's subclass may have another __bool__.
_CONTAINERS = frozenset((list, tuple, set, frozenset, deque, dict, OrderedDict, defaultdict))


def class_of_content(value: Any) -> Any:
    """The one of Python's containers that a container is, or is derived from: its methods give what
    is in it, where a derived class may run code of its own."""
    own = type(value)
    if own in _CONTAINERS:
        return own
    return next((cls for cls in own.__mro__ if cls in _CONTAINERS), own)


class Contents(Place):
    """All that one of Python's containers holds.

    Attributes:
        carried: the positions, or the keys, under which it isn't compared.
    """

    __slots__ = ("carried",)

    def __init__(self, owner: Any, path: str, guarded: bool = True) -> None:
        super().__init__(owner, path, guarded)
        self.carried: frozenset[Any] = frozenset()

    def is_empty(self) -> bool:
        return type(self.owner) in _CONTAINERS and not self.owner

    def label(self, key: Any) -> str:
        return f"{self.path}[{key!r}]"

    def _but_for_carried(self, keys: Iterable[Any]) -> Pairs:
        compared = [key for key in keys if key not in self.carried]
        return _together(operator.itemgetter, compared, self.owner)


class Elements(Contents):
    """All elements of a list, tuple, deque or set."""

    __slots__ = ()

    def content(self) -> dict[Any, Any]:
        return dict(enumerate(class_of_content(self.owner).__iter__(self.owner)))

    def replace(self, content: dict[Any, Any]) -> None:
        values = list(content.values())
        if isinstance(self.owner, list):
            self.owner[:] = values
        elif isinstance(self.owner, deque):
            self.owner.clear()
            self.owner.extend(values)
        else:
            self.owner.clear()
            self.owner.update(values)

    def put(self, changes: dict[Any, Any]) -> None:
        cls = class_of_content(self.owner)
        for position, value in changes.items():
            cls.__setitem__(self.owner, position, value)

    def at(self, key: Any) -> Any:
        cls = class_of_content(self.owner)
        return cls.__getitem__(self.owner, key) if key < cls.__len__(self.owner) else MISSING

    def live(self) -> Live:
        if self.carried:
            return [], self._but_for_carried(range(len(self.owner)))
        if type(self.owner) not in _CONTAINERS:
            return [], [(class_of_content(self.owner).__iter__, self.owner)]
        return [self.owner], []

    def sized(self) -> Any:
        return self.owner if self.carried else None


_SHARED = (bool, int, str, bytes, tuple, type(None))


class Appended(Elements):
    """A list or a deque to which the step's code appends, and with which it does nothing else: what
    is there already isn't compared, and its changes are what it appends."""

    __slots__ = ()

    def __init__(self, owner: Any, path: str) -> None:
        super().__init__(owner, path, guarded=False)

    def added(self, before: dict[Any, Any]) -> dict[Any, Any] | None:
        """What has been appended since it held ``before``, by number; None if that can't be told:
        a full deque has dropped as many of its first ones, and they may be the same objects."""
        old, now = list(before.values()), list(self.content().values())
        length = getattr(self.owner, "maxlen", None)
        if length is None or len(now) < length:
            return dict(enumerate(now[len(old) :]))
        counts = range(min(len(old), length), -1, -1)
        kept = next(n for n in counts if all(map(operator.is_, now[:n], old[len(old) - n :])))
        # Constants of the code may be appended again and again; what is computed is a new object.
        several = len(set(map(id, old))) < len(old)
        if several or (kept and all(type(value) in _SHARED for value in now[:kept])):
            return None
        return dict(enumerate(now[kept:]))


class Items(Contents):
    """All items of a dict."""

    __slots__ = ("with_keys",)

    def __init__(self, owner: Any, path: str, with_keys: bool = True, guarded: bool = True) -> None:
        super().__init__(owner, path, guarded)
        self.with_keys = with_keys

    def content(self) -> dict[Any, Any]:
        if type(self.owner) in _CONTAINERS:
            return dict(self.owner)
        return dict(class_of_content(self.owner).items(self.owner))

    def replace(self, content: dict[Any, Any]) -> None:
        if list(self.content()) != list(content):
            self.owner.clear()
        self.put(content)

    def put(self, changes: dict[Any, Any]) -> None:
        cls = class_of_content(self.owner)
        for key, value in changes.items():  # not update(), which adds in a Counter
            cls.__setitem__(self.owner, key, value)

    def at(self, key: Any) -> Any:
        return class_of_content(self.owner).get(self.owner, key, MISSING)

    def live(self) -> Live:
        cls = class_of_content(self.owner)
        keys, values = cls.keys(self.owner), cls.values(self.owner)
        if self.carried:
            return [keys], self._but_for_carried(keys)
        return ([keys, values] if self.with_keys else [values]), []


class Attributes(Place):
    """All of an object's own attributes; of a tensor but those that the package keeps there."""

    __slots__ = ("_hidden",)

    def __init__(self, value: Any, path: str) -> None:
        own = dict_of(value)
        super().__init__({} if own is None else own, path, guarded=False)
        self._hidden = OWN_ATTRIBUTES if issubclass(type(value), torch.Tensor) else frozenset()

    def content(self) -> dict[Any, Any]:
        own = self.owner
        return {k: own[k] for k in own if k not in self._hidden}

    def replace(self, content: dict[Any, Any]) -> None:
        for name in self.content().keys() - content.keys():
            del self.owner[name]
        self.put(content)

    def put(self, changes: dict[Any, Any]) -> None:
        for name, value in changes.items():
            if value is not MISSING:
                self.owner[name] = value
            else:
                self.owner.pop(name, None)

    def at(self, key: Any) -> Any:
        return self.owner.get(key, MISSING)


def _together(getter: Callable[..., Any], keys: Iterable[Any], owner: Any) -> Pairs:
    """What gives the values of ``owner`` under these keys in one call."""
    wanted = tuple(keys)
    if len(wanted) == 1:
        wanted *= 2  # itemgetter("a") gives a value, not a tuple
    if not wanted:
        return []
    # 1 and True are equal, and some keys can't be hashed.
    are_names = all(type(key) is str for key in wanted)
    return [(_same_getter(getter, wanted) if are_names else getter(*wanted), owner)]


@functools.lru_cache(4096)
def _same_getter(getter: Callable[..., Any], keys: tuple[str, ...]) -> Any:
    """One function for the same names: what many owners are asked by is asked in one go."""
    return getter(*keys)
