"""Functions, their cells and globals on the walk, and what each call takes from where it is."""

from __future__ import annotations

import builtins
import dataclasses
import sys
import types
from collections.abc import Iterable
from typing import Any

from xla_dtensor.compilation.code.asked_types import types_asked
from xla_dtensor.compilation.code.installed import is_installed
from xla_dtensor.compilation.code.names import (
    describe,
    is_library,
    names_of,
)
from xla_dtensor.compilation.objects.called_places import Variable
from xla_dtensor.compilation.objects.carried import Carried, is_state, parts_of
from xla_dtensor.compilation.objects.kinds import fields_of
from xla_dtensor.compilation.objects.places import MISSING, Elements, Entries, Items, Place, Slots
from xla_dtensor.compilation.objects.readers import names_of_reader, reader
from xla_dtensor.compilation.objects.registered import REGISTRIES
from xla_dtensor.compilation.objects.remade import is_record
from xla_dtensor.compilation.watch.walk import Walk

_MANY_MODULES = 50
# What a function has besides its code that isn't in its ``__dict__``.
_OF_FUNCTIONS = ("__doc__", "__name__", "__qualname__", "__module__", "__annotations__")


class WalkCode(Walk):
    """What is found in code; see `Watch`."""

    def _function(self, function: types.FunctionType, path: str) -> None:
        code = function.__code__
        self.codes.add(code)
        self._note(path, "function", code)
        module = function.__globals__.get("__name__")
        wrapped = function.__dict__.get("__wrapped__")
        if module is not None and module.startswith("xla_dtensor."):
            # Our own hooks: what they depend on has guards of its own. But an optimizer's step is
            # the user's.
            if wrapped is not None:
                self._walk(wrapped, path)
            return
        if self._skips(module) and not self._has_run(code):
            if self._expecting:
                names = names_of(code)
                self._names.attributes |= names.attributes
                self._names.assigned |= names.assigned
        elif not is_library(module):
            names = names_of(code)
            asked = types_asked(code)
            self._asks_types |= asked.asks(function)
            self._takes_types |= asked.takes
            self._compares_numbers |= asked.compares_numbers(function)
            # A package that looks for modules or globals by names that it makes up (pytest's and
            # transformers' loaders do) means its own: following it would bring in everything.
            if is_installed(module):
                names = dataclasses.replace(names, others_globals=False, any_module=False)
            self._names.update(names)
            self._place(Slots(function, ("__code__", "__defaults__", "__kwdefaults__"), path))
            namespace = function.__globals__
            _, known = self._globals.setdefault(id(namespace), (namespace, set()))
            known |= names.globals
            self._stored.setdefault(id(namespace), set()).update(names.stored)
            if names.any_global or self._names.others_globals:
                known |= {name for name in namespace if not name.startswith("__")}
            if id(namespace) not in self._placed_globals:
                # Once a walk: by then earlier walks have said which names matter.
                self._placed_globals.add(id(namespace))
                taken = self._taken(Entries(namespace, (), "", guarded=False), sorted(known))
                for name in sorted((known & namespace.keys()) - taken):
                    value = namespace[name]
                    if reader(value) == name:  # where it is called, its code says with what
                        self._note(name, "opaque", value)
                    else:
                        self._walk(value, name)
            for name in names.modules:
                self._imported(name)
            if names.any_module:
                self._any_import()
            for name, default in zip(
                reversed(code.co_varnames[: code.co_argcount]),
                reversed(function.__defaults__ or ()),
                strict=False,
            ):
                self._walk(default, f"{describe(function)}'s default {name}")
            if function.__kwdefaults__:
                self._walk(function.__kwdefaults__, f"{describe(function)}'s defaults")
            own = function.__dict__
            read = [n for n in own if self._is_read(n)]
            self._assigned(function, path, read)
            self._entries(own, read, path, function)
            named = [name for name in _OF_FUNCTIONS if name in self._names.attributes]
            if named:
                place = Slots(function, named, path)
                self._place(place)
                for name, value in place.content().items():
                    self._walk(value, f"{path}.{name}")
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._cell(cell, name)
        if wrapped is not None:
            self._walk(wrapped, path)

    def _reader(self, name: str) -> None:
        """A function of Python's or torch's was found that reads more than it is given: some code
        may call it by another name."""
        names = names_of_reader(name)
        self._readers.add(name)
        self._names.update(names)
        self._asks_types |= name == "type"
        if names.any_module:
            self._any_import()

    def _registered(self) -> None:
        """What torch calls for code that names one of its functions."""
        for registry in REGISTRIES:
            if self._calls(*registry.named) or registry.named & self._names.attributes:
                self.live.append((dict.values, registry.table))  # another may be put there
                for path, function in registry.functions():
                    self._walk(function, path)

    def _any_import(self) -> None:
        """The code imports by names that it makes up."""
        if not self._any_module:
            self._any_module = True
            names = [n for n in list(sys.modules) if not (is_installed(n) or is_library(n))]
            if len(names) > _MANY_MODULES:  # to follow all takes minutes
                self.imports.update(names)
                for name in names:
                    self._note(name, "opaque", sys.modules.get(name))
            else:
                for name in names:
                    self._imported(name)

    def _imported(self, name: str) -> None:
        if is_library(name) or name in self.imports:
            return
        self.imports.add(name)
        module = sys.modules.get(name)
        if module is not None:
            self._walk(module, name)

    def _cell(self, cell: types.CellType, name: str) -> None:
        if id(cell) in self._seen:
            return
        self._seen[id(cell)] = cell, name
        self._alone(Slots(cell, ("cell_contents",), name, shown=name))

    def _alone(self, place: Slots | Variable) -> None:
        """What a place of one value holds."""
        self._place(place)
        (key,) = place.keys
        if self._taken(place, place.keys):
            place.guarded = False
            return
        value = place.at(key)
        if value is not MISSING:
            self._walk(value, place.label(key))

    def _globals_place(self, namespace: dict[str, Any], names: set[str]) -> None:
        taken = {c.key for c in self.carried if c.place.owner is namespace}
        builtin = names & vars(builtins).keys() - namespace.keys()
        self._builtins |= builtin
        stored = self._stored.get(id(namespace), set()) - (names & namespace.keys()) - taken
        if stored:
            self._place(Entries(namespace, sorted(stored), "", guarded=False))
        self._place(Entries(namespace, sorted((names - taken) & namespace.keys()), ""))
        if taken:
            self._place(Entries(namespace, sorted(taken), "", guarded=False))

    # --- what each call takes from where it is -------------------------------------------------

    def _taken(self, place: Place, keys: Iterable[Any]) -> frozenset[Any]:
        """Those of a place's keys whose values each call takes from there."""
        if not self._carried:
            return frozenset()
        taken = [
            key for key in keys if place.label(key) in self._carried and is_state(place.at(key))
        ]
        for key in taken:
            self.carried.append(Carried(place, key))
            self._inside(place.at(key), place.label(key))
        return frozenset(taken)

    def _inside(self, value: Any, path: str) -> None:
        """The lists, dicts and records in what a call takes like an argument: the step mustn't
        change them, since it is given others in the next call."""
        for name, inner in parts_of(value):
            self._inside(inner, f"{path}{name}")
        if not self._of_library(type(value)):  # its methods may be called
            self._class(type(value))
        place: Place
        if isinstance(value, list):
            place = Elements(value, path, guarded=False)
        elif isinstance(value, dict):
            place = Items(value, path, guarded=False)
        elif is_record(value) and hasattr(value, "__dict__"):
            place = Entries(vars(value), vars(value), path, guarded=False)
        elif is_record(value):
            place = Slots(value, fields_of(value), path, guarded=False)
        else:
            return
        self._place(place)
        self.inside.add(place.container)
