"""The walk: from a step's function through every object that its code can reach by name."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from xla_dtensor.compilation.code.installed import is_installed
from xla_dtensor.compilation.code.names import is_library, is_library_class
from xla_dtensor.compilation.code.reflection import (
    data_descriptors,
    inherited_names,
    is_strict,
    referent,
)
from xla_dtensor.compilation.code.uses import APPENDS, APPENDS_INSIDE
from xla_dtensor.compilation.objects.carried import Carried, is_state
from xla_dtensor.compilation.objects.found import is_atom
from xla_dtensor.compilation.objects.places import MISSING, Appended, Chosen, Items, Place
from xla_dtensor.compilation.objects.readers import reader
from xla_dtensor.compilation.watch.names_met import NamesMet
from xla_dtensor.compilation.watch.reached import Reached

_APPENDED, _OF_LISTS = (list, deque), (dict, defaultdict, OrderedDict)
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_MANY_MODULES = 50
_DEEPEST = 40
"""How many objects one inside of the other are followed in one go. Each takes up to seven of
Python's frames, of which there are 1000, and a linked list may have any length."""


class Walk:
    """One round: each object that the names known so far lead to, once.

    Args:
        followers: who knows what objects consist of.
        names: those known so far, to which it adds.
        carried: what the step keeps from one call to the next and replaces, by name in messages:
            each call takes it from there (`Carried`).
        executed: the code of installed packages that is followed; None: all that is found.
        expecting: whether the walk is for a step that may run other code of theirs: of what it
            reaches it takes the names that the methods use.
        ran: all code that the trace has run, of which alone it is asked what it reads; None: all
            that is found. ``self.optimizer.step()`` names ``step``, which the object's own method
            is called, too.

    Attributes:
        reached: what it has come by.
        classes: those whose methods have been looked at.
        making: those of which it was looked at what makes their objects.
        stored: the globals that the code assigns, by the ``id`` of their dict.
        by_chance: whether it is at what only names that are made up lead to.
        asks_for_absent: whether the code may ask for attributes that aren't there.
        of_library: whether a class is defined by a library.
        data_descriptors, inherited_names: see the functions of these names.
    """

    def __init__(
        self,
        followers: Followers,
        names: NamesMet,
        carried: frozenset[str],
        executed: frozenset[types.CodeType] | None,
        expecting: bool,
        ran: frozenset[types.CodeType] | None = None,
    ) -> None:
        self._followers, self.names, self.reached = followers, names, Reached()
        self._carried, self._executed, self.expecting = carried, executed, expecting
        self.ran = ran
        self.classes: set[type] = set()
        self.making: set[type] = set()
        self.stored: dict[int, set[str]] = {}
        self.asks_for_absent = names.calls("getattr", "hasattr")
        self._any_module = self.by_chance = False
        self._last: list[tuple[Any, str]] = []
        self._depth = 0
        self._deeper: deque[tuple[Follower, Any, str]] = deque()
        self._seen: dict[int, tuple[Any, str]] = {}
        self._by_class: dict[tuple[type, Any], Followed] = {}
        self._is_strict: Callable[[type], bool] = functools.cache(is_strict)
        self.of_library: Callable[[type], bool] = functools.cache(is_library_class)
        self.data_descriptors: Callable[[type], set[str]] = functools.cache(data_descriptors)
        self.inherited_names: Callable[[type], frozenset[str]] = functools.cache(inherited_names)

    def follow(self, value: Any, path: str) -> None:
        """Go on with what an object consists of, if it is met for the first time."""
        cls = type(value)
        if cls in _PROXIES:
            self.follow(referent(value), path)
            return
        strict = self._is_strict(cls)
        if not strict:
            if not isinstance(value, torch.Tensor) and is_atom(value):
                self._followers.of_atoms(self, value, path)
                return
            if (name := reader(value)) is not None and self.names.add_reader(name).any_module:
                self.import_any()
        seen = self._seen.get(id(value))
        if seen is None:
            self._seen[id(value)] = value, path
            _, noted, follower = self._followers.of_kinds[-1] if strict else self._kind(value)
            if noted is not None:
                self.reached.note_kind(path, noted, value)
            if follower is not None:
                self._go_on(follower, value, path)
        elif not strict:
            self.reached.note(path, "same as", seen[1])

    def _go_on(self, follower: Follower, value: Any, path: str) -> None:
        """What an object consists of; of what lies too deep when the stack is empty again."""
        if self._depth == _DEEPEST:
            self._deeper.append((follower, value, path))
            return
        self._depth += 1
        try:
            follower(self, value, path)
            while self._depth == 1 and self._deeper:
                later, value, path = self._deeper.popleft()
                later(self, value, path)
        finally:
            self._depth -= 1

    def follow_last(self, value: Any, path: str) -> None:
        """Go on with what only a name that the code makes up leads to: what is in a Python module,
        of which it may be anything. Of functions there only those count that a trace has seen
        running (`code/installed.py`): all would lead from each script to whatever it is made of."""
        if self._executed is None or self.by_chance:
            self.follow(value, path)
        else:
            self._last.append((value, path))

    def end(self) -> None:
        """Follow what is to be followed last."""
        self.by_chance = True
        for value, path in self._last:
            self.follow(value, path)
        self.by_chance = False

    def _kind(self, value: Any) -> Followed:
        key = type(value), getattr(value, "__class__", None)  # `isinstance` asks for both
        found = self._by_class.get(key)
        if found is None:
            kinds = self._followers.of_kinds
            found = self._by_class[key] = next(k for k in kinds if isinstance(value, k.classes))
        return found

    def has_met(self, value: Any) -> bool:
        """Whether an object has been met in this round."""
        return id(value) in self._seen

    # --- places --------------------------------------------------------------------------------

    def place(self, place: Place) -> None:
        """Look at a place, and follow nothing."""
        self.reached.places.append(place)

    def read(
        self,
        place: Chosen,
        but_for: Sequence[str] = (),
        name: str | None = None,
        by_name: bool = True,
    ) -> None:
        """Look at a place, and follow what is there.

        Args:
            but_for: the keys of what isn't followed.
            name: what the code calls it, if not by the place's keys.
            by_name: whether it is only found where the code names it.
        """
        taken = self.taken(place, place.keys)
        if taken:
            self.place(place.only(sorted(taken), guarded=False))
            place = place.only([key for key in place.keys if key not in taken])
        self.place(place)
        for key, value in place.content().items():
            if value is not MISSING and key not in but_for:
                follow = self.follow_named if by_name else self._follow_whole
                follow(name or key, value, place.label(key))

    def follow_named(self, name: str, value: Any, path: str) -> None:
        """Go on with what the code finds under a name. Of a list to which it only appends the
        content doesn't matter."""
        if type(value) in _APPENDED and self.names.only(APPENDS, name):
            self.appended(value, path)
        elif type(value) in _OF_LISTS and self.names.only(APPENDS_INSIDE, name):
            self.place(Items(value, path))
            keys = tuple(key if is_atom(key) else id(key) for key in value)
            self.reached.note(path, type(value), keys)
            for key, inner in value.items():
                follow = self.appended if type(inner) in _APPENDED else self.follow
                follow(inner, f"{path}[{key!r}]")
        else:
            self.follow(value, path)

    def _follow_whole(self, name: str, value: Any, path: str) -> None:
        self.follow(value, path)

    def appended(self, value: Any, path: str) -> None:
        """Look at a list to which the code appends, and follow nothing."""
        self.reached.note(path, "opaque", value)
        self.place(Appended(value, path))

    def assigned(self, place: Chosen, among: Iterable[str] | None = None) -> None:
        """Look at what the code assigns in the container of a place that it reads."""
        names: Iterable[str] = self.names.assigned_but_for(place.keys)
        if among is not None:
            assigned = frozenset(names)
            names = [name for name in among if name in assigned]
        if names:
            self.place(place.only(names, guarded=False))

    def hooks(self, table: Mapping[Any, Any], path: str) -> None:
        """Functions that torch calls, by keys that mean nothing."""
        self.place(Items(table, path, with_keys=False))
        for number, hook in enumerate(table.values()):
            self.follow(hook, f"{path}[{number}]")

    def taken(self, place: Place, keys: Iterable[Any]) -> frozenset[Any]:
        """Those of a place's keys whose values each call takes from there."""
        if not self._carried:
            return frozenset()
        taken = [
            key for key in keys if place.label(key) in self._carried and is_state(place.at(key))
        ]
        self.reached.carried += [Carried(place, key) for key in taken]
        return frozenset(taken)

    # --- Python modules ------------------------------------------------------------------------

    def imported(self, name: str, last: bool = False) -> None:
        """The code imports a Python module; ``last``: by a name that it makes up."""
        if is_library(name) or name in self.reached.imports:
            return
        self.reached.imports.add(name)
        module = sys.modules.get(name)
        if module is not None:
            (self.follow_last if last else self.follow)(module, name)

    def import_any(self) -> None:
        """The code imports by names that it makes up."""
        if self._any_module:
            return
        self._any_module = True
        names = [n for n in list(sys.modules) if not (is_installed(n) or is_library(n))]
        if len(names) <= _MANY_MODULES:
            for name in names:
                self.imported(name, last=True)
            return
        self.reached.imports.update(names)  # only compared: following all of them takes minutes
        for name in names:
            self.reached.note(name, "opaque", sys.modules.get(name))

    def skips(self, module_name: str | None) -> bool:
        """Whether code of a Python module counts only where it has run."""
        if self._executed is None or not is_installed(module_name):
            return False
        self.names.meets_installed = True
        return True

    def has_run(self, code: types.CodeType | None) -> bool:
        """Whether code of an installed package counts."""
        return self._executed is None or code in self._executed


Follower = Callable[[Walk, Any, str], None]
"""Tells a walk what an object consists of, given its path."""


class Followed(NamedTuple):
    """How objects of one kind are followed.

    Attributes:
        classes: theirs.
        noted: what is noted of each (`Reached.note_kind`); None: its follower says.
        follower: goes on with what they consist of; None: they are followed no further.
    """

    classes: Any
    noted: Any
    follower: Follower | None


class Followers(NamedTuple):
    """Who knows what objects consist of.

    Attributes:
        of_atoms: follows what is compared by value.
        of_kinds: the first kind that fits counts; the last is that of any object.
    """

    of_atoms: Follower
    of_kinds: Sequence[Followed]
