"""Functions, their cells and globals on the walk, and what each call takes from where it is."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

from xla_dtensor.compilation.carried import Carried, is_state, parts_of
from xla_dtensor.compilation.code_names import (
    describe,
    is_library,
    names_of,
)
from xla_dtensor.compilation.kinds import fields_of
from xla_dtensor.compilation.objects import is_record
from xla_dtensor.compilation.places import MISSING, Elements, Entries, Items, Place, Slots
from xla_dtensor.compilation.walk import Walk

_NUMBERS = frozenset({"int", "float", "bool", "complex", "numbers"})


class WalkCode(Walk):
    """What is found in code; see `Watch`."""

    def _function(self, function: types.FunctionType, path: str) -> None:
        code = function.__code__
        self._note(path, "function", code)
        module = function.__globals__.get("__name__")
        if module is not None and module.startswith("xla_dtensor."):
            return  # our own hooks: what they depend on has guards of its own
        if self._skips(module) and not self._has_run(code):
            if self._expecting:
                names = names_of(code)
                self._names.attributes |= names.attributes
                self._names.assigned |= names.assigned
        elif not is_library(module):
            names = names_of(code)
            if "type" in names.globals and names.globals & _NUMBERS:
                self.asks_types = True
            self._names.update(names)
            self._place(Slots(function, ("__code__", "__defaults__", "__kwdefaults__"), path))
            namespace = function.__globals__
            _, known = self._globals.setdefault(id(namespace), (namespace, set()))
            known |= names.globals
            if id(namespace) not in self._placed_globals:
                # Once a walk: by then earlier walks have said which names matter.
                self._placed_globals.add(id(namespace))
                taken = self._taken(Entries(namespace, (), "", guarded=False), sorted(known))
                for name in sorted((known & namespace.keys()) - taken):
                    self._walk(namespace[name], name)
            for name in names.modules:
                self._imported(name)
            for name, default in zip(
                reversed(code.co_varnames[: code.co_argcount]),
                reversed(function.__defaults__ or ()),
                strict=False,
            ):
                self._walk(default, f"{describe(function)}'s default {name}")
            if function.__kwdefaults__:
                self._walk(function.__kwdefaults__, f"{describe(function)}'s defaults")
            own = function.__dict__
            self._entries(own, [n for n in own if self._is_read(n)], path, function)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._cell(cell, name)
        wrapped = function.__dict__.get("__wrapped__")
        if wrapped is not None:
            self._walk(wrapped, path)

    def _imported(self, name: str) -> None:
        module = sys.modules.get(name)
        if module is not None and not is_library(name):
            self._walk(module, name)

    def _cell(self, cell: types.CellType, name: str) -> None:
        if id(cell) in self._seen:
            return
        self._seen[id(cell)] = cell, name
        place = Slots(cell, ("cell_contents",), name, shown=name)
        self._place(place)
        if self._taken(place, place.keys):
            place.guarded = False
            return
        value = place.at("cell_contents")
        if value is not MISSING:
            self._walk(value, name)

    def _globals_place(self, namespace: dict[str, Any], names: set[str]) -> None:
        taken = {c.key for c in self.carried if c.place.owner is namespace}
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
