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

import itertools
import operator
import sys
import types
from collections.abc import Iterator, Set
from typing import Any

import torch

from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.code.identities import identities
from xla_dtensor.compilation.code.reflection import cache_of
from xla_dtensor.compilation.objects.found import Found, content_of, is_atom
from xla_dtensor.compilation.objects.places import MISSING, Entries, Place, Slots
from xla_dtensor.compilation.watch.walk_objects import WalkObjects
from xla_dtensor.errors import DataDependentError
from xla_dtensor.tensors.base import CLASS_OF_TENSOR


class Watch(WalkObjects):
    """What can be read from ``roots``, pairs of a name for messages and a thing.

    Args:
        carried: what the step keeps from one call to the next and replaces, by name in messages:
            each call takes it from there (`Carried`).
        executed: the code of installed packages that is followed; None: all that is found.
        expecting: whether the walk is for a step that may run other code of theirs: of what it
            reaches it takes the names that the methods use.
        known: an earlier one from some of the roots, whose names this one takes over.
        fixed: whether the step's code finds optimizers' hyperparameters as they are.

    Attributes:
        places: every container on the way.
        tensors: the tensors found, by id, with their paths.
        arrays: the NumPy arrays and buffers found, with their content.
        live: what else is compared by identity: pairs of a function and its argument, whose result
            is an iterable. Unlike in a place, a trace undoes no change there.
        imports: the Python modules that the code imports, or takes from ``sys.modules``.
        caches: functions under ``functools.cache``, with their paths.
        absent: those of the imports that hadn't been imported yet.
        jax_arrays: the ids of the JAX arrays found.
        shared: queues, locks and semaphores found, with their paths: the step mustn't put, take,
            or leave them acquired.
        consumed: iterators found, with their paths: the step mustn't take from them.
        scripted: modules of TorchScript's.
        random_sources: generators of random numbers that the step may draw from.
        optimizers: the optimizers found, by id.
        settings: the entries of their param groups, if the code names those: (``id`` of the group,
            key).
        carried: the places found of those that each call takes its values from.
        inside: the lists, dicts and objects that are part of what is there (`Place.container`).
        meets_installed: whether the code names any of installed packages.
        codes: the code of all functions found.
    """

    def __init__(
        self,
        roots: list[tuple[str, Any]],
        carried: frozenset[str] = frozenset(),
        executed: frozenset[types.CodeType] | None = None,
        expecting: bool = False,
        known: Watch | None = None,
        fixed: bool = False,
    ) -> None:
        super().__init__(roots, carried, executed, expecting, known, fixed)
        self._cached: list[tuple[Any, dict[Any, Any], str]] = []
        self._arm()

    def keys_of_places(self) -> set[tuple[int, Any]]:
        """Everything that is looked at, as (container, key); of a list or a dict as a whole."""
        found: set[tuple[int, Any]] = set()
        for place in self.places:
            keys = place.keys if isinstance(place, Entries | Slots) else (None,)
            found |= {(place.container, key) for key in keys}
        return found

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors that the step is known to reach."""
        found = [tensor for tensor, _ in self.tensors.values()]
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                found += group["params"]
        return found

    @property
    def names_read(self) -> frozenset[str] | None:
        """The names of attributes that the step's code may read; None for any."""
        if self._names.any_attribute:
            return None
        return frozenset(self._names.attributes | self._library_reads | CLASS_OF_TENSOR)

    @property
    def asks_ids(self) -> bool:
        """Whether the step's code calls ``id``."""
        return self._calls("id")

    def met(self, arguments: Arguments) -> tuple[Any, ...]:
        """Those of the arguments that the step finds elsewhere, too: it may ask whether they are
        one object."""
        given = arguments.objects()
        known = self.known.intersection(map(id, given))
        return tuple(x if id(x) in known else None for x in given) if known else ()

    def assigned_in(self, place: Place) -> set[str] | None:
        """The names of attributes that the step's code may assign in a place; None for any."""
        if place.container not in self._plain or self._names.any_attribute:
            return None
        if self._calls("setattr", "delattr"):
            return None
        return self._names.assigned

    @property
    def feeds(self) -> bool:
        """Whether the step's code finds inputs of the program in param groups."""
        return not (self._fixed or self.asks_types)

    @property
    def feeds_groups(self) -> bool:
        """Whether it finds them there before an optimizer steps."""
        return self.feeds and "param_groups" in self._names.attributes

    @property
    def feeds_users(self) -> bool:
        """Whether user's code may find them, before an optimizer steps or in its ``step``."""
        own = any(not self._of_library(type(optimizer)) for optimizer in self.optimizers.values())
        return self.feeds and (own or self.feeds_groups)

    def made_meanwhile(self) -> list[tuple[str, Any]]:
        """What a trace has brought that the walk before it couldn't know: modules that it has
        imported, and what it has put into caches."""
        found = [(name, sys.modules[name]) for name in self.absent & sys.modules.keys()]
        for cached, path in self.caches:
            inner = [part for part in cache_of(cached)[1] if not is_atom(part)]
            found += [(f"what {path} keeps", p) for p in inner if not isinstance(p, type)]
        return found

    def check(self) -> None:
        """Called after a trace.

        Raises:
            DataDependentError: it has emptied a cache of a function, or changed what C++ holds of a
                module.
        """
        for scripted in self.scripted:
            scripted.check()
        path = self.forgotten() if "cache_clear" in self._names.attributes else None
        if path is not None:
            raise DataDependentError(
                f"the step empties the cache of {path} (cache_clear()), which would happen when it "
                "is traced, not in every call: do it outside"
            )

    def remember_caches(self, earlier: Watch | None = None) -> None:
        """Note what is in the caches of functions after a trace (or what an ``earlier`` watch has
        noted): what is added to them later changes nothing."""
        self._cached = (
            [(cached, dict(cache_of(cached)[0]), path) for cached, path in self.caches]
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
        apart = changed | self.settings  # which have guards of their own
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
            self._place(kept)
            for key, value in kept.content().items():
                self._note(kept.label(key), "value" if is_atom(value) else "opaque", value)
        if labels:
            self._arm()

    def _only_assigned(self) -> list[Entries | Slots]:
        taken = {carried.where() for carried in self.carried}
        return [
            place
            for place in self.places
            if isinstance(place, Entries | Slots)
            and not place.guarded
            and place.container not in self.inside
            and taken.isdisjoint((place.container, key) for key in place.keys)
        ]

    # --- comparing ----------------------------------------------------------------------------

    def _arm(self) -> None:
        """Prepare the loop in C."""
        self._iterables: list[Any] = []
        self._pairs: list[tuple[Any, Any]] = list(self.live)
        self._mappings: list[Any] = list(self._large)
        self._empty: list[Any] = []
        for place in self.places:
            if not place.guarded:
                continue
            if place.is_empty():
                self._empty.append(place.owner)
                continue
            iterables, pairs = place.live()
            self._iterables += iterables
            self._pairs += pairs
            sized = place.sized()
            if sized is not None:
                self._mappings.append(sized)
        self.known = frozenset(
            (*self.tensors, *map(id, self._typed), *(id(place.owner) for place in self.places))
        )
        self._lengths = list(map(len, self._mappings))
        self._types = list(map(type, self._typed))
        self._own = identities(self._own_dicts())
        self._held = tuple(self._current())
        self._expected = identities(self._held)

    def _current(self) -> Iterator[Any]:
        return itertools.chain(
            itertools.chain.from_iterable(self._iterables),
            itertools.chain.from_iterable(itertools.starmap(operator.call, self._pairs)),
        )

    def _own_dicts(self) -> Iterator[Any]:
        """The dicts of objects' attributes: another may be put in place of one."""
        return map(object.__getattribute__, self._typed, itertools.repeat("__dict__"))

    def untouched(self) -> bool:
        """Whether everything is the very object that it was: no need to look closer."""
        try:
            return (
                not any(self._empty)
                and identities(self._current()) == self._expected
                and list(map(len, self._mappings)) == self._lengths
                and list(map(type, self._typed)) == self._types
                and identities(self._own_dicts()) == self._own
                and all(content_of(value) == content for value, content in self.arrays)
                and all(probe() is content for probe, content in self.probes)
                and self.forgotten() is None
            )
        except (LookupError, AttributeError, ValueError, RuntimeError):
            return False  # something is gone, or another thread is at it

    def differences(self, other: Watch) -> list[tuple[Found | None, Found | None]]:
        """What ``other``, a later walk from the same roots, found otherwise: (before, now)."""
        mine = {found.path: found for found in self.found}
        theirs = {found.path: found for found in other.found}
        result: list[tuple[Found | None, Found | None]] = []
        for path in mine.keys() | theirs.keys():
            before, now = mine.get(path), theirs.get(path)
            if before is None or now is None or not before.same(now):
                result.append((before, now))
        order = {found.path: i for i, found in enumerate((*self.found, *other.found))}
        result.sort(key=lambda pair: order[(pair[0] or pair[1]).path])  # type: ignore[union-attr]
        return result
