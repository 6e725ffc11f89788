"""What a step's Python can read: found from its code, compared before each call.

From the function (and what else the step is known to use) the watch follows what the code names:
closure cells, globals, defaults, attributes, elements of lists and dicts, the code of the functions
it meets, modules with their parameters and hooks. Numbers and strings are compared by value,
tensors by identity, and everything else by what it consists of.

Comparing is one loop in C over the identity of everything that was found. Only when that finds a
difference is the walk made again, and what it finds compared by value: a list made anew with the
same content is no change.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Set
from typing import Any

import torch

from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.code.identities import identities
from xla_dtensor.compilation.code.names import is_library_class
from xla_dtensor.compilation.code.reflection import cache_of
from xla_dtensor.compilation.objects.found import Found, content_of, is_atom
from xla_dtensor.compilation.objects.places import MISSING, Appended, Chosen, Place
from xla_dtensor.compilation.watch.followers import FOLLOWERS, reach
from xla_dtensor.compilation.watch.names_met import NamesMet
from xla_dtensor.compilation.watch.walk import Walk
from xla_dtensor.errors import DataDependentError

_END = (object(),)
"""Between what gives values, or an element that goes from one list's end to the beginning of the
next one would be where it was."""
_GETTERS = (operator.itemgetter, operator.attrgetter)
_DICTS = frozenset((dict, OrderedDict, defaultdict, types.MappingProxyType))
"""Those that give their keys backwards without a user's code."""


class Watch:
    """What can be read from ``roots``, pairs of a name for messages and a thing.

    Args:
        carried, executed, expecting, ran: see `Walk`.
        fixed: see `NamesMet`.
        known: an earlier one from some of the roots, whose names this one takes over.

    Attributes:
        names: the names in all code found.
        reached: what was found.
        known: the ids of the tensors found, and of the objects whose places are compared.
    """

    def __init__(
        self,
        roots: list[tuple[str, Any]],
        carried: frozenset[str] = frozenset(),
        executed: frozenset[types.CodeType] | None = None,
        expecting: bool = False,
        known: Watch | None = None,
        fixed: bool = False,
        ran: frozenset[types.CodeType] | None = None,
    ) -> None:
        self.names = names = NamesMet(fixed=fixed)
        if known is not None:
            names.take_over(known.names, expecting)
        walk = functools.partial(Walk, FOLLOWERS, names, carried, executed, expecting, ran)
        self.reached = reach(roots, walk)
        self._absent = {name for name in self.reached.imports if name not in sys.modules}
        self._cached: list[tuple[Any, dict[Any, Any], str]] = []
        self._arm()

    def keys_of_places(self) -> set[tuple[int, Any]]:
        """Everything that is looked at, as (container, key); of a list or a dict as a whole."""
        found: set[tuple[int, Any]] = set()
        for place in self.reached.places:
            keys = place.keys if isinstance(place, Chosen) else (None,)
            found |= {(place.container, key) for key in keys}
        return found

    def appended(self) -> Iterator[Appended]:
        """The lists to which the step's code appends, and at which it doesn't look in any way."""
        places = self.reached.places
        looked_at = {place.container for place in places if not isinstance(place, Appended)}
        found = {p.container: p for p in places if isinstance(p, Appended)}
        return (place for container, place in found.items() if container not in looked_at)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors that the step is known to reach."""
        found = [tensor for tensor, _ in self.reached.tensors.values()]
        for optimizer in self.reached.optimizers.values():
            for group in optimizer.param_groups:
                found += group["params"]
        return found

    def met(self, arguments: Arguments) -> tuple[Any, ...]:
        """Those of the arguments that the step finds elsewhere, too: it may ask whether they are
        one object."""
        given = arguments.objects()
        known = self.known.intersection(map(id, given))
        return tuple(x if id(x) in known else None for x in given) if known else ()

    def assigned_in(self, place: Place) -> set[str] | None:
        """The names of attributes that the step's code may assign in a place; None for any."""
        names = self.names
        if place.container not in self.reached.plain or names.any_attribute:
            return None
        return None if names.calls("setattr", "delattr") else names.assigned

    @property
    def feeds_users(self) -> bool:
        """Whether user's code may find inputs of the program in param groups, before an optimizer
        steps or in its ``step``."""
        classes = map(type, self.reached.optimizers.values())
        names = self.names
        return names.feeds and (names.feeds_groups or not all(map(is_library_class, classes)))

    def made_meanwhile(self) -> list[tuple[str, Any]]:
        """What a trace has brought that the walk before it couldn't know: modules that it has
        imported, and what it has put into caches."""
        found = [(name, sys.modules[name]) for name in self._absent & sys.modules.keys()]
        for cached, path in self.reached.caches:
            inner = [part for part in cache_of(cached)[1] if not is_atom(part)]
            found += [(f"what {path} keeps", p) for p in inner if not isinstance(p, type)]
        return found

    def check(self) -> None:
        """Called after a trace.

        Raises:
            DataDependentError: it has emptied a cache of a function, or changed what C++ holds of a
                module.
        """
        for scripted in self.reached.scripted:
            scripted.check()
        path = self.forgotten() if "cache_clear" in self.names.attributes else None
        if path is not None:
            raise DataDependentError(
                f"the step empties the cache of {path} (cache_clear()), which would happen when it "
                "is traced, not in every call: do it outside"
            )

    def remember_caches(self, earlier: Watch | None = None) -> None:
        """Note what is in the caches of functions after a trace (or what an ``earlier`` watch has
        noted): what is added to them later changes nothing."""
        self._cached = (
            [(cached, dict(cache_of(cached)[0]), path) for cached, path in self.reached.caches]
            if earlier is None
            else earlier._cached
        )

    def forgotten(self) -> str | None:
        """The name of a cache that no longer has what was noted, if there is one."""
        for cached, before, path in self._cached:
            now = cache_of(cached)[0]
            if any(now.get(key, MISSING) is not value for key, value in before.items()):
                return path
        return None

    def unchanged(self, changed: Set[tuple[int, Any]]) -> frozenset[str]:
        """The names in messages of the attributes that the step's code assigns somewhere and never
        reads, but for those that a trace has ``changed`` (container, key)."""
        apart = changed | self.reached.settings  # settings have guards of their own
        return frozenset(
            place.label(key)
            for place in self._only_assigned()
            for key in place.keys
            if (place.container, key) not in apart and place.at(key) is not MISSING
        )

    def keep(self, labels: Set[str]) -> None:
        """Compare these, too. A trace that has left such an attribute as it was has perhaps
        assigned what was there already: where it is something else, the step has to be asked."""
        for place in self._only_assigned() if labels else ():
            kept = place.only([key for key in place.keys if place.label(key) in labels])
            if not kept.keys:
                continue
            self.reached.places.append(kept)
            for key, value in kept.content().items():
                self.reached.note_whole(kept.label(key), value)
        if labels:
            self._arm()

    def _only_assigned(self) -> list[Chosen]:
        taken = {carried.where() for carried in self.reached.carried}
        return [
            place
            for place in self.reached.places
            if isinstance(place, Chosen)
            and not place.guarded
            and place.container not in self.reached.inside
            and taken.isdisjoint((place.container, key) for key in place.keys)
        ]

    # --- comparing ----------------------------------------------------------------------------

    def _arm(self) -> None:
        """Prepare the loop in C."""
        reached = self.reached
        self._iterables: list[Any] = []
        asked: dict[int, tuple[Any, list[Any]]] = {}  # each getter, and the objects to call it with
        all_pairs, self._mappings = list(reached.live), list(reached.large)
        self._typed, self._arrays, self._probes = reached.typed, reached.arrays, reached.probes
        self._empty: list[Any] = []
        for place in reached.places:
            if not place.guarded:
                continue
            if place.is_empty():
                self._empty.append(place.owner)
                continue
            iterables, pairs = place.live()
            for each in iterables:
                self._iterables += (each, _END)
            all_pairs += pairs
            sized = place.sized()
            if sized is not None:
                self._mappings.append(sized)
        apart: list[tuple[Any, list[Any]]] = []
        for function, owner in all_pairs:
            if type(function) in _GETTERS:
                asked.setdefault(id(function), (function, []))[1].append(owner)
            else:  # gives any number of values: its end is marked
                apart += [(function, [owner]), (operator.itemgetter(0, 0), [_END])]
        self._asked = [*asked.values(), *apart]
        owners = (place.owner for place in reached.places)
        self.known = frozenset((*reached.tensors, *map(id, (*self._typed, *owners))))
        self._dicts = [m for m in self._mappings if type(m) in _DICTS]
        self._lengths = list(map(len, self._mappings))
        self._types = list(map(type, self._typed))
        self._kept = tuple(self._beside())
        self._marks = identities(self._kept)
        self._held = tuple(self._current())
        self._expected = identities(self._held)

    def _current(self) -> Iterator[Any]:
        flat = itertools.chain.from_iterable
        return itertools.chain(
            flat(self._iterables), flat(flat(itertools.starmap(map, self._asked)))
        )

    def _beside(self) -> Iterator[Any]:
        """The dicts of objects' attributes, as another may be put in place of one; and of dicts the
        key that came last, as one may come while another one goes."""
        return itertools.chain(
            map(object.__getattribute__, self._typed, itertools.repeat("__dict__")),
            map(next, map(reversed, self._dicts), itertools.repeat(None)),
        )

    def untouched(self) -> bool:
        """Whether everything is the very object that it was: no need to look closer."""
        try:
            return (
                not any(self._empty)
                and identities(self._current()) == self._expected
                and list(map(type, self._typed)) == self._types
                and (
                    (
                        list(map(len, self._mappings)) == self._lengths
                        and identities(self._beside()) == self._marks
                    )
                    or self._grew_aside()
                )
                # Most steps have none of these three; making no generator for them saves time.
                and (not self._arrays or all(content_of(a) == c for a, c in self._arrays))
                and (not self._probes or all(probe() is c for probe, c in self._probes))
                and (not self._cached or self.forgotten() is None)
            )
        except (LookupError, AttributeError, ValueError, RuntimeError):
            return False  # something is gone, or another thread changes it just now

    def _grew_aside(self) -> bool:
        """Whether of all that is looked at only modules' globals are more or fewer, and by no name
        that the code reads: a script, or the next cell of a notebook, has defined something. (The
        walk takes seconds for a model of a large library.)"""
        lengths, kept = list(map(len, self._mappings)), tuple(self._beside())
        own = len(self._typed)
        if any(map(operator.is_not, kept[:own], self._kept)):
            return False
        pairs = zip(self._mappings, lengths, self._lengths, strict=True)
        changed = [mapping for mapping, now, before in pairs if now != before]
        newest = zip(self._dicts, kept[own:], self._kept[own:], strict=True)
        changed += [each for each, now, before in newest if now is not before]
        if not all(map(self._is_read_alike, changed)):
            return False
        self._lengths, self._kept, self._marks = lengths, kept, identities(kept)
        return True

    def _is_read_alike(self, mapping: Any) -> bool:
        names = self.names
        namespace = names.namespaces.get(id(mapping))
        if namespace is None or names.any_global or names.others_globals:
            return False
        if any(each is mapping for each in self.reached.large):  # compared by samples
            return False
        read = set(namespace[1])
        # The mapping may be an object's ``__dict__`` (a module's, say): then attributes count.
        if any(own is mapping for own in self._kept[: len(self._typed)]):
            if names.reads is None:
                return False
            read |= names.reads | {"__getattr__"}
        for place in self.reached.places:
            if place.owner is not mapping:
                continue
            if not isinstance(place, Chosen):
                return False
            if place.guarded:  # others aren't compared
                read.difference_update(place.keys)
        read.difference_update(c.key for c in self.reached.carried if c.place.owner is mapping)
        # What is left weren't names of the mapping before: whether it has one now.
        return read.isdisjoint(mapping)

    def differences(self, other: Watch) -> list[tuple[Found | None, Found | None]]:
        """What ``other``, a later walk from the same roots, found otherwise: (before, now)."""
        mine = {found.path: found for found in self.reached.found}
        theirs = {found.path: found for found in other.reached.found}
        gone = {path: found for path, found in mine.items() if path not in theirs}
        pairs = [(mine.get(path), theirs.get(path)) for path in {**gone, **theirs}]
        return [(a, b) for a, b in pairs if a is None or b is None or not a.same(b)]
