"""Classes on the walk: what they give their objects, the user's own and those of libraries."""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
import types
from typing import Any

from torch import nn
from torch.optim import Optimizer

from xla_dtensor.compilation.code.names import (
    ASKED_FOR,
    called_by,
    is_library_class,
    names_of,
)
from xla_dtensor.compilation.code.reflection import (
    DESCRIPTORS,
    code_of,
    is_callable,
    protocol_names,
    registered_with,
    subclasses,
)
from xla_dtensor.compilation.objects.found import is_atom
from xla_dtensor.compilation.objects.places import Entries, Slots
from xla_dtensor.compilation.watch.walk_code import WalkCode

_HEAP_TYPE = 1 << 9
# Nothing in the code says when an object is thrown away.
_NEVER_CALLED = ASKED_FOR | {"__del__", "__doc__", "__module__"}
_OF_CLASSES = ("__name__", "__qualname__")
# Classes of Python's whose objects are made of what the user's code says.
_USERS_CONTENT = (BaseException, dataclasses.Field)


class WalkClasses(WalkCode):
    """What is found in classes; see `Watch`."""

    def _library_methods(self, cls: type) -> None:
        """What the methods that the code names read, of classes whose code isn't followed: the
        ``data`` behind a ``UserDict``'s ``[]``."""
        for base in cls.__mro__:
            if not self._of_library(base):
                continue
            for name, method in vars(base).items():
                special = name.startswith("__") and name not in _NEVER_CALLED
                if special or self._is_read(name):
                    code = code_of(method)
                    if code is None:
                        continue
                    self._library_reads |= names_of(code).attributes
                    if not special and name in self._names.attributes:  # ``logger.setLevel``
                        self._names.assigned |= names_of(code).assigned

    def _has_users_slots(self, value: Any) -> bool:
        """Whether an object's slots hold what the user's code has put there."""
        return not self._of_library(type(value)) or isinstance(value, _USERS_CONTENT)

    def _class(self, cls: type) -> None:
        """The methods and attributes that a class gives its objects."""
        if cls in self._seen_classes:
            return
        for base in cls.__mro__:
            if base in self._seen_classes:
                continue
            self._seen_classes.add(base)
            if self._of_library(base):
                self._library_class(base)
                continue
            own, path = base.__dict__, base.__qualname__
            if "__match_args__" in self._names.attributes:
                self._names.attributes |= set(own.get("__match_args__", ()))
            self.live.append((operator.attrgetter("__mro__"), base))
            self._note(f"{path}.__mro__", "bases", base.__mro__)
            named = [name for name in _OF_CLASSES if name in self._names.attributes]
            if named and base.__flags__ & _HEAP_TYPE:  # one of C's has its name made for each read
                self._place(Slots(base, named, path))
                for name in named:
                    self._note(f"{path}.{name}", "value", getattr(base, name))
            overridden = _overridden(base)
            names = [n for n in own if n in overridden or self._is_member_used(base, n)]
            place = Entries(own, names, path, setter=base)
            for name in self._without_taken(place):
                self._walk(own[name], f"{path}.{name}")
            assigned = self._names.assigned.difference(names)
            if assigned:
                self._place(Entries(own, sorted(assigned), path, guarded=False, setter=base))
            self._class(type(base))

    def _library_class(self, cls: type) -> None:
        """Somebody may put another method, or another default, into it."""
        if cls.__flags__ & _HEAP_TYPE:
            names = [name for name in cls.__dict__ if self._is_library_member_used(cls, name)]
            self._place(Entries(cls.__dict__, names, cls.__qualname__, setter=cls))
            for name in names:
                member = cls.__dict__[name]
                self._note(
                    f"{cls.__qualname__}.{name}", "value" if is_atom(member) else "opaque", member
                )
            forward = cls.__dict__.get("forward")
            if issubclass(cls, nn.Module) and isinstance(forward, types.FunctionType):
                for namespace, called in called_by(forward):
                    self.live.append((functools.partial(map, namespace.get), called))
                    for name in called:
                        self._note(f"{cls.__qualname__}'s {name}", "opaque", namespace.get(name))
            assigned = self._names.assigned.difference(names)
            if assigned:
                own, path = cls.__dict__, cls.__qualname__
                self._place(Entries(own, sorted(assigned), path, guarded=False, setter=cls))

    def _is_library_member_used(self, cls: type, name: str) -> bool:
        member = cls.__dict__[name]
        if isinstance(member, DESCRIPTORS) or name in _NEVER_CALLED:
            return False
        special = name.startswith("__") and callable(member)
        return special or name in self._names.attributes or name in self._library_reads

    def _is_member_used(self, cls: type, name: str) -> bool:
        member = cls.__dict__[name]
        if name in _NEVER_CALLED:
            return name in self._names.attributes
        if isinstance(member, DESCRIPTORS):
            return False
        if self._is_read(name) or (name in self._names.assigned and hasattr(member, "__set__")):
            return True
        return name.startswith("__") and name.endswith("__") and is_callable(member)

    def _registry(self, cls: type, path: str) -> None:
        """Which classes a class has below it, and which have been registered with an abstract
        one."""
        if "__subclasses__" in self._names.attributes:
            below: list[type] = type.__subclasses__(cls)
            self.probes.append((lambda: type.__subclasses__(cls) == below, True))
            self._note(f"{path}.__subclasses__()", "registry", set(below))
            for number, subclass in enumerate(below):
                self._walk(subclass, f"{path}.__subclasses__()[{number}]")
        if not isinstance(cls, abc.ABCMeta):
            return
        self._names.attributes |= protocol_names(cls)
        token = abc.get_cache_token()
        self.probes.append((lambda: abc.get_cache_token() == token, True))
        registered = {ref for each in (cls, *subclasses(cls)) for ref in registered_with(each)}
        self._note(f"{path}'s registry", "registry", registered)


@functools.lru_cache(4096)
def _overridden(cls: type) -> frozenset[str]:
    """Methods that a class has in place of a library's, whose code may call them: ``default`` of a
    ``json.JSONEncoder``. Not those of modules: what of them is called has a name of its own."""
    if issubclass(cls, nn.Module | Optimizer):
        return frozenset()
    theirs = {
        name
        for base in cls.__mro__[1:-1]
        if is_library_class(base)
        for name, member in vars(base).items()
        if not name.startswith("__") and callable(member)
    }
    return frozenset(theirs & vars(cls).keys())
