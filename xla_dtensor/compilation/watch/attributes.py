"""Followers of objects by their attributes, and by the methods that their classes give them."""

from __future__ import annotations

import abc
import argparse
import dataclasses
import datetime
import decimal
import enum
import functools
import logging
import operator
import threading
import types
from collections.abc import Callable, Collection, Iterator, Set
from typing import Any

import jax
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from xla_dtensor.compilation.code.installed import is_installed
from xla_dtensor.compilation.code.names import (
    ASKED_FOR,
    called_by,
    formatted,
    is_library,
    is_library_class,
    names_of,
)
from xla_dtensor.compilation.code.reflection import (
    CACHED,
    DESCRIPTORS,
    all_slots_of,
    code_of,
    dict_of,
    is_callable,
    protocol_names,
    registered_with,
    subclasses,
)
from xla_dtensor.compilation.code.threads import replaced
from xla_dtensor.compilation.objects.places import Entries, Slots
from xla_dtensor.compilation.watch.walk import Walk
from xla_dtensor.tensors.attributes import OWN_ATTRIBUTES
from xla_dtensor.tensors.subclasses import shown_class

_HEAP_TYPE = 1 << 9
# `__del__` runs when an object is freed: no name in the code shows it.
_NEVER_CALLED = ASKED_FOR | {"__del__", "__doc__", "__module__"}
# Methods that run when an object or a class is made, which the object's other methods don't call.
# (Where the step makes another object of the class, ``type(x)(...)``, the trace sees them running.)
_MAKING = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__"})
# Methods of schedulers that run behind the program (`trace/schedulers.py`), or aren't called.
OF_SCHEDULERS = frozenset({"step", "state_dict", "__init__"})
_OF_CLASSES = ("__name__", "__qualname__")
_LOCK = type(threading.Lock())
MODULE_PARTS = ("_parameters", "_buffers", "_modules")
MODULE_OWN = frozenset(nn.Module().__dict__) - {"training", "_forward_hooks", "_forward_pre_hooks"}
_NOT_USERS = MODULE_OWN | OWN_ATTRIBUTES
# Attributes that Python's import sets in a module: they lead to every other module.
_OF_IMPORT = frozenset({"__builtins__", "__loader__", "__spec__"})
# Wrappers, with the attribute that holds the wrapped function.
_AROUND = {
    **dict.fromkeys((functools.partial, functools.partialmethod), "func"),
    **dict.fromkeys((staticmethod, classmethod, types.MethodType), "__func__"),
    property: "fget",
}
# Libraries' classes whose objects' attributes are compared and shown without being named.
_COMPARED_WHOLE = (types.SimpleNamespace, argparse.Namespace)
# Immutable classes written in C, whose value is in no attribute: compared by their repr.
_IMMUTABLE: dict[type, Callable[[Any], str]] = {
    cls: cls.__repr__
    for cls in (
        *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
        decimal.Decimal,
    )
}
# Python's classes whose objects hold the user's values.
_USERS_CONTENT = (BaseException, dataclasses.Field)


def of_class(walk: Walk, cls: type, path: str) -> None:
    """A class as an object: what it gives its own, and which there are below it."""
    library_methods(walk, cls)
    methods(walk, cls)
    methods(walk, type(cls))
    making(walk, cls)
    of_registry(walk, cls, path)
    if issubclass(cls, enum.Enum):
        for name, member in cls.__members__.items():
            walk.follow(member, f"{path}.{name}")


def making(walk: Walk, cls: type) -> None:
    """What runs when the code makes an object of a class, or a class below it."""
    for base in cls.__mro__:
        if base in walk.making or walk.of_library(base):
            continue
        walk.making.add(base)
        used = [name for name in base.__dict__ if name in _MAKING]
        walk.read(Entries(base.__dict__, used, base.__qualname__, setter=base))


def methods(walk: Walk, cls: type) -> None:
    """The methods and attributes that a class gives its objects."""
    cls = shown_class(cls)
    if cls in walk.classes:
        return
    is_torch_s = issubclass(cls, nn.Module | Optimizer)
    inherited = walk.inherited_names(cls) if is_torch_s else frozenset()
    for base in cls.__mro__:
        # torch's code may call methods that a subclass overrides, though no user code names them.
        if base in walk.classes and (walk.of_library(base) or inherited.isdisjoint(vars(base))):
            continue
        walk.classes.add(base)
        own, path, names = base.__dict__, base.__qualname__, walk.names
        if "__match_args__" in names.attributes:
            matched = own.get("__match_args__", ())
            if not isinstance(matched, tuple):  # a property, as of classes that nanobind makes
                matched = getattr(base, "__match_args__", ())
            names.attributes |= set(matched)
        if walk.of_library(base):
            library_class(walk, base)
            continue
        walk.reached.live.append((operator.attrgetter("__mro__"), base))
        walk.reached.note(f"{path}.__mro__", "bases", base.__mro__)
        named = [name for name in _OF_CLASSES if name in names.attributes]
        if named and base.__flags__ & _HEAP_TYPE:  # one of C's has its name made for each read
            walk.read(Slots(base, named, path))
        overridden = _overridden(base)
        behind = OF_SCHEDULERS if issubclass(base, LRScheduler) else ()
        used = [
            n
            for n in own
            if n not in behind and (n in overridden or _is_used(walk, base, n, inherited))
        ]
        place = Entries(own, used, path, setter=base)
        walk.read(place)
        walk.assigned(place)
        methods(walk, type(base))


def library_class(walk: Walk, cls: type) -> None:
    """Somebody may put another method, or another default, into it."""
    if not cls.__flags__ & _HEAP_TYPE:
        return
    own, path = cls.__dict__, cls.__qualname__
    names = own.keys() - replaced(cls)
    used = [n for n in own if n in names and _is_used_of_library(walk, own[n], n)]
    place = Entries(own, used, path, setter=cls)
    walk.place(place)
    for name in place.keys:
        walk.reached.note_whole(place.label(name), own[name])
        if is_put(walk, own[name]):
            walk.follow(own[name], place.label(name))
    forward = own.get("forward")
    if issubclass(cls, nn.Module) and isinstance(forward, types.FunctionType):
        for namespace, called in called_by(forward):
            walk.reached.live.append((functools.partial(map, namespace.get), called))
            for name in called:
                value = namespace.get(name)
                walk.reached.note(f"{path}'s {name}", "opaque", value)
                if is_put(walk, value):
                    walk.follow(value, name)
    walk.assigned(place)


def is_put(walk: Walk, value: Any) -> bool:
    """Whether something in a library's module or class has been put there by the user, or by a
    package whose code has run."""
    cls = type(value)
    while (inner := _AROUND.get(cls)) is not None:
        value = getattr(value, inner)
        cls = type(value)
    if cls is types.FunctionType:
        module, own = value.__module__, value.__globals__.get("__name__")
        if "__wrapped__" in vars(value) and not is_installed(own):
            module = own  # `functools.wraps` has set the inner function's
        return not is_library(module) and (not walk.skips(module) or walk.has_run(value.__code__))
    if issubclass(cls, type):
        own = vars(value).values() if walk.skips(value.__module__) else ()
        return any(walk.has_run(code_of(member)) for member in own)
    if cls is types.SimpleNamespace or issubclass(cls, nn.Module):
        return True
    return not (walk.of_library(cls) or walk.skips(cls.__module__))


def library_methods(walk: Walk, cls: type) -> None:
    """What the methods that the code names read, of classes whose code isn't followed: the
    ``data`` behind a ``UserDict``'s ``[]``."""
    known = walk.names
    for base in filter(walk.of_library, cls.__mro__):
        for name, method in vars(base).items():
            special = name.startswith("__") and name not in _NEVER_CALLED
            if not (special or known.is_read(name)) or (code := code_of(method)) is None:
                continue
            known.in_libraries |= names_of(code).attributes
            if not special and name in known.attributes:  # ``logger.setLevel``
                known.assigned |= names_of(code).assigned


def _is_used_of_library(walk: Walk, member: Any, name: str) -> bool:
    if isinstance(member, DESCRIPTORS) or name in _NEVER_CALLED:
        return False
    special = name.startswith("__") and callable(member)
    return special or name in walk.names.attributes or name in walk.names.in_libraries


def _is_used(walk: Walk, cls: type, name: str, inherited: Set[str]) -> bool:
    member = cls.__dict__[name]
    if name in _NEVER_CALLED:
        return name in walk.names.attributes
    if isinstance(member, DESCRIPTORS) or name in _MAKING:
        return False
    if walk.names.is_read(name) or name in inherited or name == "__abstractmethods__":
        return True
    if name in walk.names.assigned and hasattr(member, "__set__"):
        return True
    return name.startswith("__") and name.endswith("__") and is_callable(member)


def of_registry(walk: Walk, cls: type, path: str) -> None:
    """Which classes a class has below it, and which have been registered with an abstract one."""
    reached = walk.reached
    # Python's own have thousands, and more with each class that is made.
    if "__subclasses__" in walk.names.attributes and cls.__module__ != "builtins":
        below: list[type] = type.__subclasses__(cls)
        reached.probes.append((lambda: type.__subclasses__(cls) == below, True))
        reached.note(f"{path}.__subclasses__()", "registry", set(below))
        for number, subclass in enumerate(below):
            walk.follow(subclass, f"{path}.__subclasses__()[{number}]")
    if not isinstance(cls, abc.ABCMeta):
        return
    walk.names.attributes |= protocol_names(cls)
    token = abc.get_cache_token()
    reached.probes.append((lambda: abc.get_cache_token() == token, True))
    registered = {ref for each in (cls, *subclasses(cls)) for ref in registered_with(each)}
    reached.note(f"{path}'s registry", "registry", registered)


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


def of_atom(walk: Walk, value: Any, path: str) -> None:
    """What is compared by value; an enum, a named tuple may have methods."""
    walk.reached.note(path, "value", value)
    if type(value) is str:
        walk.names.attributes |= formatted(value)
    elif not walk.of_library(type(value)):
        own_parts(walk, value, path)


def of_object(walk: Walk, value: Any, path: str) -> None:
    """An object of which no more is known than its class."""
    cls, own, reached = type(value), dict_of(value), walk.reached
    wrapped = (own or {}).get("__wrapped__")
    if wrapped is not None and walk.of_library(cls):  # a wrapper: lru_cache, a compiled step
        reached.note(path, cls)
        if cls is CACHED:
            reached.caches.append((value, path))
        walk.follow(wrapped, path)
        return
    if cls.__module__.startswith("xla_dtensor."):
        reached.note(path, "opaque", value)  # what of it matters has guards of its own
    elif own is not None:
        reached.note(path, "object", cls)
        reached.typed.append(value)
        library_methods(walk, cls)
        text = next((_IMMUTABLE[base] for base in cls.__mro__ if base in _IMMUTABLE), None)
        if text is not None:
            reached.note(f"{path}'s value", "value", text(value))
        attributes(walk, value, own, path)
        slots(walk, value, path)
    elif getattr(cls, "__slots__", None) is not None and _has_users_slots(walk, value):
        reached.note(path, "object", cls)
        slots(walk, value, path)
    else:
        # Its parts aren't known: it is compared by identity.
        reached.note(path, "opaque", value)
        if isinstance(value, _LOCK):
            reached.shared.append((value, path))
            if "locked" in walk.names.attributes:
                reached.probe(f"{path}.locked()", value.locked)
        if isinstance(value, jax.Array):
            reached.jax_arrays.add(id(value))
        if isinstance(value, Iterator):
            reached.consumed.append((value, path))
    methods(walk, cls)


def attributes(walk: Walk, value: Any, own: dict[str, Any], path: str) -> None:
    """Those in an object's dict that the code reads, and those that it assigns."""
    cls = type(value)
    names = list(filter(walk.names.is_read, own))
    if issubclass(cls, logging.Logger):
        # `_cache` is what `isEnabledFor` has said so far, of the levels, which are read besides.
        # Logging calls run when the step is traced, so handlers count only if the code names them.
        named = "handlers" in walk.names.attributes
        names = [name for name in names if name != "_cache" and (named or name != "handlers")]
    if issubclass(cls, logging.Manager) and "loggerDict" not in walk.names.attributes:
        # All loggers of the process, whose caches `setLevel` empties.
        names = [name for name in names if name != "loggerDict"]
    if issubclass(cls, types.ModuleType):
        names = [n for n in names if n not in _OF_IMPORT or n in walk.names.attributes]
        if isinstance(own.get("__getattr__"), types.FunctionType):
            names.append("__getattr__")
    if cls is types.SimpleNamespace or not any(map(walk.of_library, cls.__mro__[:-1])):
        walk.reached.plain.add(id(own))
    only_assigned(walk, value, path, names)
    place, unnamed = Entries(own, names, path), list[str]()
    if walk.names.any_attribute and issubclass(cls, types.ModuleType):
        unnamed = [name for name in names if not walk.names.is_named(name)]
    walk.read(place, but_for=unnamed, by_name=not issubclass(cls, _COMPARED_WHOLE))
    for name in unnamed:
        walk.follow_last(own[name], place.label(name))


def only_assigned(walk: Walk, owner: Any, path: str, read: Collection[str]) -> None:
    """Attributes that the code assigns without reading them."""
    own = dict_of(owner)
    if own is None:
        return
    # Not hasattr, which would run a user's __getattr__; a property's value is in another attribute.
    apart = walk.data_descriptors(type(owner)).difference(own).union(_NOT_USERS, read)
    if issubclass(type(owner), nn.Module):
        apart = apart.union(*(own.get(p) or () for p in MODULE_PARTS))
    names = walk.names.assigned_but_for(apart)
    if names:
        walk.place(Entries(own, names, path, guarded=False))


def slots(walk: Walk, value: Any, path: str) -> None:
    """What an object holds in slots."""
    if not _has_users_slots(walk, value):
        return
    known = all_slots_of(type(value))  # type: ignore[arg-type]
    place = Slots(value, filter(walk.names.is_read, known), path)
    if place.keys:
        walk.read(place)
    walk.assigned(place, known)


def _has_users_slots(walk: Walk, value: Any) -> bool:
    """Whether an object's slots hold what the user's code has put there."""
    return not walk.of_library(type(value)) or isinstance(value, _USERS_CONTENT)


def own_parts(walk: Walk, value: Any, path: str) -> None:
    """The methods and attributes of an object of a user's class, apart from its content."""
    own = dict_of(value)
    if own is not None:
        walk.read(Entries(own, [n for n in own if walk.names.is_read(n) or n == "_value_"], path))
    slots(walk, value, path)
    methods(walk, type(value))
