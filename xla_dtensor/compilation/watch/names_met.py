"""The names in all code that a walk has visited."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from xla_dtensor.compilation.code.asked_types import types_asked
from xla_dtensor.compilation.code.names import Names
from xla_dtensor.compilation.objects.readers import names_of_reader
from xla_dtensor.tensors.base import CLASS_OF_TENSOR

# Methods that torch and Python call although the user's code doesn't name them.
_CALLED_BY_TORCH = {"forward", "backward", "setup_context", "jvp", "training", "__wrapped__"}


@dataclass
class NamesMet(Names):
    """Names in code, and what they say together.

    Attributes:
        in_libraries: attributes that libraries' methods read, which the code calls.
        readers: functions that read more than they are given, found under whatever name.
        namespaces: globals by the ``id`` of their dict: the dict, and the names read there.
        named: those of them that the code names, by the ``id``; others are read by names that it
            makes up.
        takes_types, compares_numbers: see `types_asked`.
        meets_installed: whether the code names any of installed packages.
        fixed: whether the code finds optimizers' hyperparameters as they are.
    """

    attributes: set[str] = field(default_factory=_CALLED_BY_TORCH.copy)
    in_libraries: set[str] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)
    namespaces: dict[int, tuple[dict[str, Any], set[str]]] = field(default_factory=dict)
    named: dict[int, set[str]] = field(default_factory=dict)
    takes_types: bool = False
    compares_numbers: bool = False
    meets_installed: bool = False
    fixed: bool = False
    _asks_types: bool = False
    # Hundreds of names, asked for at thousands of objects, most of which read few of them.
    _assigned_but: dict[frozenset[str], tuple[str, ...]] = field(default_factory=dict)
    _were_assigned: int = 0

    def take_over(self, known: NamesMet, expecting: bool) -> None:
        """Begin with those of an earlier walk from some of the roots: what led to them is there
        still, so one round will do. Of installed packages it may have taken names of code that
        hasn't run, which is for another walk before a trace (``expecting``)."""
        if known.meets_installed and not expecting:
            return
        self.update(known)
        self.in_libraries |= known.in_libraries
        self.readers |= known.readers
        self._asks_types = known.asks_types
        for number, (namespace, names) in known.namespaces.items():
            self.namespaces[number] = namespace, set(names)
        self.named.update((number, set(names)) for number, names in known.named.items())

    def add_asked(self, function: types.FunctionType) -> None:
        """Add what a function asks of the types of numbers."""
        asked = types_asked(function.__code__)
        self._asks_types |= asked.asks(function)
        self.takes_types |= asked.takes
        self.compares_numbers |= asked.compares_numbers(function)

    def add_reader(self, name: str) -> Names:
        """Add what a function of Python's or torch's may read, which some code may call by another
        name; its names."""
        names = names_of_reader(name)
        self.readers.add(name)
        self.update(names)
        self._asks_types |= name == "type"
        return names

    @property
    def asks_types(self) -> bool:
        """Whether the code may find that a number which is an input is no ``float``."""
        return self._asks_types or (self.takes_types and self.compares_numbers)

    @property
    def feeds(self) -> bool:
        """Whether the code finds inputs of the program in param groups."""
        return not (self.fixed or self.asks_types)

    @property
    def feeds_groups(self) -> bool:
        """Whether it finds them there before an optimizer steps."""
        return self.feeds and "param_groups" in self.attributes

    @property
    def reads(self) -> frozenset[str] | None:
        """The names of attributes that the code may read; None for any."""
        if self.any_attribute:
            return None
        return frozenset(self.attributes | self.in_libraries | CLASS_OF_TENSOR)

    def is_read(self, name: str) -> bool:
        """Whether the code may read an attribute of this name."""
        return self.any_attribute or self.is_named(name)

    def is_named(self, name: str) -> bool:
        """Likewise, and not by a name that it makes up."""
        return name in self.attributes or name in self.in_libraries

    def only(self, use: str, name: str) -> bool:
        return name not in self.in_libraries and super().only(use, name)

    def assigned_but_for(self, names: Iterable[str]) -> tuple[str, ...]:
        """The attributes that the code assigns, in order, but for some."""
        if len(self.assigned) != self._were_assigned:
            self._were_assigned = len(self.assigned)
            self._assigned_but.clear()
        apart = frozenset(self.assigned.intersection(names))
        found = self._assigned_but.get(apart)
        if found is None:
            found = self._assigned_but[apart] = tuple(sorted(self.assigned - apart))
        return found

    def calls(self, *functions: str) -> bool:
        """Whether the code may call one of these, by its own name or by another."""
        return not self.readers.isdisjoint(functions) or any(
            not names.isdisjoint(functions) for _, names in self.namespaces.values()
        )

    def count(self) -> int:
        """How many there are: another name may lead to other objects."""
        sets: list[Collection[Any]] = [self.uses, self.readers, *self.named.values()]
        sets += [self.attributes, self.assigned, self.stored, self.modules, self.in_libraries]
        read = (names for _, names in self.namespaces.values())
        return sum(map(len, (*sets, *read)))
