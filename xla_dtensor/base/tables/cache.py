"""Caches with a name and a limit, and tables of interned objects; all can be listed and cleared.

`caches` lists all of them, `clear` empties them. Whoever keeps something of the kind makes a
`Cache` (or an `Interned`), which is listed as long as it exists.

A thread that finds what it looks for takes no lock. Two threads that miss at the same time may both
make the value; all get the one that was put in first.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class CacheRecord:
    """One cache at one moment.

    Attributes:
        name: what it keeps.
        entries: how many it has.
        limit: how many it keeps at most; None: as many as are in use, or all (see ``note``).
        bytes: an estimate of the memory that they take; None where nobody knows.
        hits, misses: how often something was found, and how often it wasn't; None: not counted.
        note: why there is no limit.
    """

    name: str
    entries: int
    limit: int | None
    bytes: int | None
    hits: int | None
    misses: int | None
    note: str = ""


class Listed(Protocol):
    """What `caches` and `clear` ask of a cache."""

    name: str

    def record(self) -> CacheRecord:
        """What it has now."""

    def clear(self) -> None:
        """Forget what can be made again."""


_listed: weakref.WeakSet[Any] = weakref.WeakSet()
# Reentrant, like those below: the garbage collector may run in the middle of anything, and with it
# code that comes back here.
_listed_lock = threading.RLock()


def register(cache: Listed) -> None:
    """List ``cache`` in `caches` while it exists; it must be hashable by identity."""
    with _listed_lock:
        _listed.add(cache)


def _caches(name: str | None) -> list[Any]:
    with _listed_lock:
        found = list(_listed)
    return sorted((c for c in found if name is None or c.name == name), key=lambda c: c.name)


def caches() -> list[CacheRecord]:
    """All caches of the process by name."""
    return [cache.record() for cache in _caches(None)]


_puts = itertools.count(1)
_EVERY = 256  # values that are put into caches, whichever
_watchers: list[Callable[[], None]] = []


def watch_growth(watcher: Callable[[], None]) -> None:
    """Call ``watcher`` now and then while caches are filled."""
    _watchers.append(watcher)


def forget_older() -> None:
    """Let go, in caches of what is soon made again, what hasn't been used since the last time."""
    for cache in _caches(None):
        if isinstance(cache, Cache) and not cache.stays:
            cache.forget_older()


def clear(name: str | None = None) -> None:
    """Empty all caches, or those called ``name``.

    Raises:
        ValueError: none is called so.
    """
    found = _caches(name)
    if not found and name is not None:
        known = sorted({cache.name for cache in _caches(None)})
        raise ValueError(f"no cache is called {name!r}; there are {known}")
    for cache in found:
        cache.clear()


class Cache(Generic[K, V]):
    """Values by key, ``limit`` of them at most; those not used for longest go.

    The values are in two halves. What is used moves to the recent half; when that is full, the
    other one is dropped and they change places. So the ``limit / 2`` values used last are always
    there, and finding one again and again costs a look into one dict and changes none: a list in
    the order of use would cost every hit a write, under a lock.

    Args:
        name: for people: "plans".
        limit: the most values kept; None keeps all, and ``note`` says why.
        size: gives the bytes that a value takes, or None.
        stays: whether `forget_older` leaves it alone, as its values are dear.
    """

    def __init__(
        self,
        name: str,
        limit: int | None,
        *,
        size: Callable[[V], int | None] | None = None,
        note: str = "",
        stays: bool = False,
    ) -> None:
        self.name = name
        self.limit = limit
        self.note = note
        self.stays = stays or limit is None
        self.hits = self.misses = 0
        self._half = None if limit is None else max(1, limit // 2)
        self._size = size
        self._lock = threading.RLock()
        self._recent: dict[K, V] = {}
        self._older: dict[K, V] = {}
        register(self)

    # Counts are only exact with one thread: exact ones would cost a lock in every hit.
    def get(self, key: K) -> V | None:
        """The value, or None, which is no value."""
        value = self._recent.get(key)
        if value is not None:
            self.hits += 1
            return value
        value = self._older.get(key)
        if value is None:
            self.misses += 1
            return None
        self.hits += 1
        return self._place(key, value)

    def put(self, key: K, value: V) -> V:
        """Keep ``value``, unless another thread was faster; the value kept is returned."""
        known = self._older.get(key)
        return self._place(key, value if known is None else known)

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The value, made if it isn't there; outside of the lock, so that ``make`` may take long
        and use this cache itself."""
        value = self._recent.get(key)
        if value is not None:  # as in most calls
            self.hits += 1
            return value
        value = self.get(key)
        return self.put(key, make()) if value is None else value

    def _place(self, key: K, value: V) -> V:
        dropped: dict[K, V] | None = None  # goes when the lock is free: what it frees may run code
        with self._lock:
            known = self._recent.get(key)
            if known is not None:
                return known
            if self._half is not None and len(self._recent) >= self._half:
                dropped, self._older, self._recent = self._older, self._recent, {}
            self._recent[key] = value
            older = self._older.pop(key, None)
        del dropped, older
        if next(_puts) % _EVERY == 0:
            for watcher in _watchers:
                watcher()
        return value

    def forget_older(self) -> None:
        """Let go what hasn't been used since the last time."""
        with self._lock:
            dropped, self._older, self._recent = self._older, self._recent, {}
        del dropped

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            dropped = self._recent, self._older
            self._recent, self._older = {}, {}
        del dropped

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)

    def __contains__(self, key: object) -> bool:
        return key in self._recent or key in self._older

    def __iter__(self) -> Iterator[K]:
        with self._lock:
            return iter([*self._older, *self._recent])

    def values(self) -> list[V]:
        """What is kept now."""
        with self._lock:
            return [*self._older.values(), *self._recent.values()]

    def record(self) -> CacheRecord:
        """What it has now."""
        values = self.values()
        size = None
        if self._size is not None:
            sizes = [s for s in map(self._size, values) if s is not None]
            size = sum(sizes) if sizes or not values else None
        return CacheRecord(
            self.name, len(values), self.limit, size, self.hits, self.misses, self.note
        )

    def __repr__(self) -> str:
        return f"Cache({self.name!r}, {len(self)} of {self.limit})"


class Table(dict[K, V]):
    """A dict that is listed. For what stays as long as the process, because there is a fixed number
    of it, or because others hold names for it; finding something in one costs what it costs in a
    dict, and isn't counted.

    Args:
        name: for people: "groups".
        note: why nothing of it goes.
        clearable: whether it can be made again.
    """

    def __init__(self, name: str, note: str, *, clearable: bool) -> None:
        super().__init__()
        self.name = name
        self._note = note
        self._clearable = clearable
        self._lock = threading.RLock()
        register(self)

    __hash__ = object.__hash__  # type: ignore[assignment]

    def setdefault(self, key: K, value: V) -> V:
        """The value for ``key``: ``value``, unless there is one by now."""
        with self._lock:
            return super().setdefault(key, value)

    def clear(self) -> None:
        """Forget what can be made again."""
        if self._clearable:
            super().clear()

    def record(self) -> CacheRecord:
        """What it has now."""
        return CacheRecord(self.name, len(self), None, None, None, None, self._note)


class Interned(Generic[K, V]):
    """Objects of which equal ones are the same one, so that ``is`` compares them.

    One that is in use can't be dropped: there would soon be two. So objects are held weakly, and
    the ``limit`` made last strongly as well, or one that is used for a moment in every step would
    be made in every step. Values can't be None, and must be weakly referable.

    Args:
        name: for people: "forms".
        limit: how many of the objects made last are held.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.hits = self.misses = 0
        self._alive: weakref.WeakValueDictionary[K, V] = weakref.WeakValueDictionary()
        self._latest: deque[V] = deque(maxlen=limit)
        self._lock = threading.RLock()
        register(self)

    def get(self, key: K) -> V | None:
        """The object, if there is one."""
        value = self._alive.get(key)
        if value is None:
            self.misses += 1
        else:
            self.hits += 1
        return value

    def put(self, key: K, value: V) -> V:
        """The object for ``key``: ``value``, unless there is one by now."""
        with self._lock:
            known = self._alive.get(key)
            if known is not None:
                return known
            self._alive[key] = value
            # Last: what falls out at the other end is freed by this.
            self._latest.append(value)
        return value

    def clear(self) -> None:
        """Hold none any more; those in use stay what they are."""
        with self._lock:
            latest, self._latest = self._latest, deque(maxlen=self.limit)
        del latest

    def __len__(self) -> int:
        return len(self._alive)

    def values(self) -> list[V]:
        """Those that exist now."""
        return list(self._alive.values())

    def record(self) -> CacheRecord:
        """What it has now."""
        note = f"those in use, and the {self.limit} made last"
        return CacheRecord(self.name, len(self), None, None, self.hits, self.misses, note)

    def __repr__(self) -> str:
        return f"Interned({self.name!r}, {len(self)})"
