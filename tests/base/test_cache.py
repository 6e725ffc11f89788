"""Caches: bounded, listed, one value for all threads; interned objects that are in use stay."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from xla_dtensor.base.tables import cache as tables
from xla_dtensor.base.tables.cache import Cache, CacheRecord, Interned, caches, clear, register


class Thing:
    """Weakly referable, compared by identity."""


@pytest.fixture
def small_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work`` in so many threads at once; what one of them raises is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(index: int) -> None:
        start.wait()
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_finds_what_was_put() -> None:
    cache: Cache[str, int] = Cache("test", 10)
    assert cache.get("a") is None
    assert cache.put("a", 1) == 1
    assert cache.get("a") == 1
    assert "a" in cache and "b" not in cache and len(cache) == 1 and list(cache) == ["a"]
    assert cache.put("a", 2) == 1  # the first stays
    assert cache.record() == CacheRecord("test", 1, 10, None, 1, 1)


def test_never_more_than_the_limit_and_the_latest_half_is_there() -> None:
    cache: Cache[int, int] = Cache("test", 10)
    for i in range(1000):
        cache.put(i, i)
        assert len(cache) <= 10
        assert all(cache.get(j) == j for j in range(max(0, i - 4), i + 1))


def test_what_is_used_stays() -> None:
    cache: Cache[object, int] = Cache("test", 10)
    cache.put("used", 1)
    for i in range(1000):
        assert cache.get("used") == 1
        cache.put(i, i)
    assert len(cache) <= 10


def test_no_limit() -> None:
    cache: Cache[int, int] = Cache("test", None, note="few")
    for i in range(1000):
        cache.put(i, i)
    assert len(cache) == 1000
    assert cache.record().limit is None and cache.record().note == "few"


def test_what_is_dropped_is_freed() -> None:
    cache: Cache[int, Thing] = Cache("test", 4)
    first = weakref.ref(cache.put(0, Thing()))
    for i in range(1, 9):
        cache.put(i, Thing())
    assert first() is None
    last = weakref.ref(cache.values()[-1])
    cache.clear()
    assert last() is None and len(cache) == 0


def test_a_value_that_uses_the_cache_when_freed() -> None:
    cache: Cache[int, object] = Cache("test", 2)

    class Last:
        def __del__(self) -> None:
            cache.put(-1, 1)

    cache.put(0, Last())
    for i in range(1, 5):
        cache.put(i, Last())
    cache.clear()


def test_sizes() -> None:
    cache: Cache[str, int] = Cache("test", 10, size=lambda value: value or None)
    assert cache.record().bytes == 0
    cache.put("unknown", 0)
    assert cache.record().bytes is None
    cache.put("a", 3)
    cache.put("b", 4)
    assert cache.record().bytes == 7


def test_get_or_make_may_use_the_cache_inside() -> None:
    cache: Cache[int, int] = Cache("test", 10)

    def fibonacci(n: int) -> int:
        return cache.get_or_make(n, lambda: 1 if n < 2 else fibonacci(n - 1) + fibonacci(n - 2))

    assert fibonacci(30) == 1346269


def test_all_threads_get_one_value(small_switch_interval: None) -> None:
    cache: Cache[int, Thing] = Cache("test", 1000)
    found: list[list[Thing]] = [[] for _ in range(8)]

    def work(index: int) -> None:
        found[index].extend(cache.get_or_make(i, Thing) for i in range(300))

    in_threads(8, work)
    for same in zip(*found, strict=True):
        assert len(set(map(id, same))) == 1


def test_threads_over_the_limit(small_switch_interval: None) -> None:
    cache: Cache[int, int] = Cache("test", 16)

    def work(index: int) -> None:
        for i in range(2000):
            key = (i * (index + 1)) % 40
            assert cache.get_or_make(key, lambda k=key: k + 1) == key + 1
            if i % 500 == 0:
                cache.clear()

    in_threads(8, work)
    assert len(cache) <= 16


def test_listed_while_it_exists() -> None:
    cache: Cache[int, int] = Cache("a cache of this test", 10)
    cache.put(1, 1)
    (record,) = [r for r in caches() if r.name == "a cache of this test"]
    assert record == cache.record()
    clear("a cache of this test")
    assert len(cache) == 0
    del cache
    gc.collect()
    assert "a cache of this test" not in [r.name for r in caches()]
    with pytest.raises(
        ValueError, match=r"no cache is called 'a cache of this test'; there are \["
    ):
        clear("a cache of this test")


def test_others_can_be_listed() -> None:
    class Programs:
        name = "programs of this test"
        cleared = 0

        def record(self) -> CacheRecord:
            return CacheRecord(self.name, 2, None, 100, 1, 2)

        def clear(self) -> None:
            self.cleared += 1

    programs = Programs()
    register(programs)
    assert programs.record() in caches()
    clear("programs of this test")
    assert programs.cleared == 1


def test_interned_objects_in_use_stay() -> None:
    interned: Interned[int, Thing] = Interned("test", 3)
    kept = interned.put(0, Thing())
    for i in range(1, 100):
        interned.put(i, Thing())
    assert len(interned) == 4  # one in use and the latest
    interned.clear()
    assert len(interned) == 1 and interned.get(0) is kept
    assert interned.put(0, Thing()) is kept
    del kept
    interned.clear()
    gc.collect()
    assert interned.get(0) is None


def test_interned_objects_are_one_in_all_threads(small_switch_interval: None) -> None:
    interned: Interned[int, Thing] = Interned("test", 10)
    found: list[list[Thing]] = [[] for _ in range(8)]

    def work(index: int) -> None:
        for i in range(300):
            known = interned.get(i)
            found[index].append(interned.put(i, Thing()) if known is None else known)

    in_threads(8, work)
    for same in zip(*found, strict=True):
        assert len(set(map(id, same))) == 1


def test_what_is_used_is_kept_when_older_ones_go() -> None:
    cache: Cache[int, str] = Cache("forgetting", 100)
    for number in range(10):
        cache.put(number, str(number))
    tables.forget_older()
    assert len(cache) == 10  # nobody could have used them since
    assert cache.get(3) == "3"
    cache.put(10, "10")
    tables.forget_older()
    assert sorted(cache) == [3, 10]


def test_watchers_hear_of_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_watchers", [])
    heard: list[int] = []
    tables.watch_growth(lambda: heard.append(1))
    cache: Cache[int, str] = Cache("growing", None)
    for number in range(tables._EVERY):
        cache.put(number, "")
    for _ in range(2 * tables._EVERY):
        cache.get(0)
    assert len(heard) == 1
