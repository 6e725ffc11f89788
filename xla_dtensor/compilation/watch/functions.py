"""Followers of functions and Python modules: what their code can read by name."""

from __future__ import annotations

import abc
import builtins
import dataclasses
import sys
import types
from collections.abc import Collection
from typing import Any

from xla_dtensor.compilation.code.installed import is_installed
from xla_dtensor.compilation.code.names import describe, is_library, names_of
from xla_dtensor.compilation.objects.places import Entries, Slots
from xla_dtensor.compilation.objects.readers import reader
from xla_dtensor.compilation.objects.registered import REGISTRIES
from xla_dtensor.compilation.watch.attributes import attributes, is_put, methods, of_registry
from xla_dtensor.compilation.watch.torch_objects import OPERATORS
from xla_dtensor.compilation.watch.walk import Followed, Walk

_PLAIN_DATA = frozenset({list, dict, tuple, set})
# Attributes of a function that aren't in its ``__dict__``.
_OF_FUNCTIONS = ("__doc__", "__name__", "__qualname__", "__module__", "__annotations__")


def of_function(walk: Walk, function: types.FunctionType, path: str) -> None:
    """Its code with what that names: globals, cells, defaults."""
    if walk.by_chance:
        walk.reached.note(path, "opaque", function)
        return
    code = function.__code__
    walk.reached.codes.add(code)
    walk.reached.note(path, "function", code)
    module = function.__globals__.get("__name__")
    # Of the package's hooks only the code counts: what they depend on has guards of its own. But
    # an optimizer's step, which such a hook wraps, is the user's.
    if walk.ran is not None and code not in walk.ran and not is_library(module):
        # The trace never ran this function, so only its attributes can have been read.
        _as_object(walk, function, path)
    elif module is None or not module.startswith("xla_dtensor."):
        if walk.skips(module) and not walk.has_run(code):
            if walk.expecting:
                names = names_of(code)
                walk.names.attributes |= names.attributes
                walk.names.uses |= names.uses
                walk.names.assigned |= names.assigned
        elif not is_library(module):
            _users_code(walk, function, module, path)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if not walk.has_met(cell):
                walk.follow(cell, name)
    wrapped = function.__dict__.get("__wrapped__")
    if wrapped is not None:
        walk.follow(wrapped, path)


def _users_code(walk: Walk, function: types.FunctionType, module: str | None, path: str) -> None:
    code, names = function.__code__, names_of(function.__code__)
    walk.names.add_asked(function)
    # A package that looks for modules or globals by names that it makes up (pytest's and
    # transformers' loaders do) means its own: following it would bring in everything.
    if is_installed(module):
        names = dataclasses.replace(names, others_globals=False, any_module=False)
    walk.names.update(names)
    walk.place(Slots(function, ("__code__", "__defaults__", "__kwdefaults__"), path))
    namespace = function.__globals__
    _, known = walk.names.namespaces.setdefault(id(namespace), (namespace, set()))
    named = walk.names.named.setdefault(id(namespace), set())
    named |= names.globals
    known |= names.globals
    if names.any_global or walk.names.others_globals:
        known |= {name for name in namespace if not name.startswith("__")}
    is_first = id(namespace) not in walk.stored
    walk.stored.setdefault(id(namespace), set()).update(names.stored)
    if is_first:  # once a round, with the names that earlier rounds have found
        _globals(walk, namespace, known, named)
    for name in names.modules:
        walk.imported(name)
    if names.any_module:
        walk.import_any()
    for name, default in zip(
        reversed(code.co_varnames[: code.co_argcount]),
        reversed(function.__defaults__ or ()),
        strict=False,
    ):
        walk.follow(default, f"{describe(function)}'s default {name}")
    if function.__kwdefaults__:
        walk.follow(function.__kwdefaults__, f"{describe(function)}'s defaults")
    _as_object(walk, function, path)


def _as_object(walk: Walk, function: types.FunctionType, path: str) -> None:
    """What code reads of a function that it doesn't call."""
    attributes(walk, function, function.__dict__, path)
    own = [name for name in _OF_FUNCTIONS if name in walk.names.attributes]
    if own:
        walk.read(Slots(function, own, path))


def _globals(
    walk: Walk, namespace: dict[str, Any], names: set[str], named: Collection[str]
) -> None:
    taken = walk.taken(Entries(namespace, (), "", guarded=False), sorted(names))
    for name in sorted((names & namespace.keys()) - taken):
        value = namespace[name]
        if reader(value) == name:  # the code around its call says what it reads
            walk.reached.note(name, "opaque", value)
        elif name in named:
            walk.follow_named(name, value, name)
        else:
            walk.follow_last(value, name)
    for name in sorted((names & vars(builtins).keys()) - namespace.keys()):
        if is_put(walk, value := vars(builtins)[name]):
            walk.follow(value, f"builtins.{name}")


def place_globals(walk: Walk) -> None:
    """Look at the globals that the code names, when all is known of it, and at the builtins."""
    builtin: set[str] = set()
    for namespace, names in walk.names.namespaces.values():
        there = names & namespace.keys()
        taken = {c.key for c in walk.reached.carried if c.place.owner is namespace}
        stored = walk.stored.get(id(namespace), set()) - there - taken
        for keys, guarded in ((stored, False), (there - taken, True), (taken, False)):
            if keys or guarded:
                walk.place(Entries(namespace, sorted(keys), "", guarded))
        builtin |= names & vars(builtins).keys() - namespace.keys()
    if builtin:  # a user may replace a builtin
        place = Entries(vars(builtins), sorted(builtin), "builtins", grows=False)
        walk.reached.live += place.live()[1]
        for name, value in place.content().items():
            walk.reached.note(place.label(name), "opaque", value)


def of_python_module(walk: Walk, module: types.ModuleType, path: str) -> None:
    """What the code names of it."""
    if not walk.of_library(type(module)):  # ``module.__class__ = Config``, which has properties
        walk.reached.note(f"{path}'s class", "class", type(module))
        methods(walk, type(module))
    walk.reached.typed.append(module)
    if not (is_library(module.__name__) or walk.skips(module.__name__)):
        attributes(walk, module, vars(module), path)
        return
    own = vars(module)  # a user may replace a function in it
    names = sorted(walk.names.attributes & own.keys())
    walk.place(Entries(own, names, path))
    for name in names:
        if module is builtins:
            walk.follow(own[name], f"{path}.{name}")
        elif module is not sys or name != "modules":
            _in_library(walk, own[name], f"{path}.{name}")


def _in_library(walk: Walk, value: Any, path: str) -> None:
    """What a library's module has under a name that the code reads."""
    cls = type(value)
    if cls in _PLAIN_DATA or issubclass(cls, (types.ModuleType, *OPERATORS)) or is_put(walk, value):
        walk.follow(value, path)
    else:
        walk.reached.note_whole(path, value)
        if isinstance(value, abc.ABCMeta) and walk.names.calls("isinstance", "issubclass"):
            of_registry(walk, value, path)


def registered(walk: Walk) -> None:
    """What torch calls for code that names one of its functions."""
    for registry in REGISTRIES:
        if walk.names.calls(*registry.named) or registry.named & walk.names.attributes:
            walk.reached.live.append((dict.values, registry.table))  # more may be registered
            for path, function in registry.functions():
                walk.follow(function, path)


KINDS = (
    Followed(types.FunctionType, None, of_function),
    Followed(types.ModuleType, "Python module", of_python_module),
)
