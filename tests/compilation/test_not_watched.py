"""What docs/compile.md says that isn't watched: what happens, and whether the audit finds it; and
work in threads and queues, which is refused."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import functools
import importlib
import inspect
import json
import queue
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from scipy.interpolate import CubicSpline

import xla_dtensor as xd
from xla_dtensor.compilation.watch import walk


@pytest.fixture(autouse=True)
def only_audited_where_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xd.config, "audit", 0)


def values(step: Callable[..., Any], change: Callable[[], Any], *args: Any) -> list[float]:
    x = torch.ones(2, device="xla")
    before = step(x, *args)[0].item()
    change()
    return [before, step(x, *args)[0].item()]


def stale_for_the_audit(function: Callable[..., Any], change: Callable[[], Any]) -> None:
    step = xd.compile(function, audit=1)
    x = torch.ones(2, device="xla")
    step(x)
    change()
    with pytest.raises(xd.StaleStepError):
        step(x)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "scale"

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * float(file.read_text())

    file.write_text("2")
    assert values(xd.compile(function), lambda: file.write_text("3")) == [2, 2]
    file.write_text("2")
    stale_for_the_audit(function, lambda: file.write_text("3"))


def test_how_full_a_queue_is() -> None:
    waiting: queue.Queue[int] = queue.Queue()
    waiting.put(1)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * waiting.qsize()

    assert values(xd.compile(function), lambda: waiting.put(2)) == [1, 1]
    stale_for_the_audit(function, lambda: waiting.put(3))


@pytest.mark.parametrize("kind", [list, dict])
def test_one_of_many_elements(kind: Any) -> None:
    many: Any = [1.0] * 20_000 if kind is list else dict.fromkeys(range(20_000), 1.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * many[7]

    assert values(xd.compile(function), lambda: many.__setitem__(7, 5.0)) == [1, 1]
    stale_for_the_audit(function, lambda: many.__setitem__(7, 6.0))


@pytest.mark.parametrize("kind", [list, dict])
def test_many_elements_that_all_change(kind: Any) -> None:
    """As a table that is loaded anew: that is seen."""
    many: Any = [1.0] * 20_000 if kind is list else dict.fromkeys(range(20_000), 1.0)

    def change() -> None:
        for i in range(20_000):
            many[i] = 5.0

    assert values(xd.compile(lambda x: x * many[7]), change) == [1, 5]


def test_which_of_two_equal_values_it_is() -> None:
    """Numbers, strings and tuples of them are compared by value: Python may keep one or two."""
    numbers = [1.0, 2.0]
    kept = tuple(numbers)
    holder = SimpleNamespace(kept=kept)
    step = xd.compile(lambda x: x * (2 if holder.kept is kept else 3))
    assert values(step, lambda: setattr(holder, "kept", tuple(numbers))) == [2, 2]


@pytest.mark.parametrize("kind", [SimpleNamespace, argparse.Namespace])
def test_what_namespaces_compare_and_show(kind: Any) -> None:
    """The code says nothing of the attribute; and there may be tensors among the others."""
    one, other = kind(k=1.0), kind(k=1.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if one == other else 3)

    assert values(xd.compile(function), lambda: setattr(other, "k", 5.0)) == [2, 2]
    other.k = 1.0
    stale_for_the_audit(function, lambda: setattr(other, "k", 5.0))
    compared = xd.compile(lambda x, a, b: x * (2 if a == b else 3))
    x = torch.ones(2, device="xla")
    assert [compared(x, kind(k=1), kind(k=k))[0].item() for k in (1, 2)] == [2, 3]


def test_a_weak_reference() -> None:
    """What a step refers to stays alive, be it weakly."""

    class Thing:
        pass

    things = [Thing()]
    reference = weakref.ref(things[0])
    step = xd.compile(lambda x: x * (2 if reference() is not None else 3))
    assert values(step, things.clear) == [2, 2]


def in_a_thread(x: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(x * 2))
    thread.start()
    thread.join()
    return found[0]


def in_a_pool(x: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: x * 2).result()


def through_asyncio(x: torch.Tensor) -> torch.Tensor:
    return asyncio.run(asyncio.to_thread(lambda: x * 2))


def caught(x: torch.Tensor) -> torch.Tensor:
    try:
        return in_a_thread(x)
    except RuntimeError:
        return x


@pytest.mark.parametrize("function", [in_a_thread, in_a_pool, through_asyncio, caught])
def test_threads_are_refused(function: Any) -> None:
    with pytest.raises(xd.DataDependentError, match=r"starts a thread|ThreadPoolExecutor"):
        xd.compile(function)(torch.ones(2, device="xla"))


@pytest.mark.parametrize("kind", [queue.Queue, queue.SimpleQueue])
def test_a_worker_of_before_computes(kind: Any) -> None:
    """In a thread that ran before the step: what it gives back is none of the step's."""
    scale = torch.full((2,), 2.0, device="xla")
    asked, answered = kind(), kind()

    def work() -> None:
        while asked.get():
            answered.put(scale * 2)

    def function(x: torch.Tensor) -> torch.Tensor:
        asked.put(True)
        return x + answered.get()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with pytest.raises(xd.DataDependentError, match=r"Queue|while it was traced"):
            xd.compile(function)(torch.ones(2, device="xla"))
    finally:
        asked.put(False)
        thread.join()


def test_coroutines_of_one_thread() -> None:
    scale = [2.0]

    def function(x: torch.Tensor) -> torch.Tensor:
        async def part() -> torch.Tensor:
            await asyncio.sleep(0)
            return x * scale[0]

        async def both() -> torch.Tensor:
            one, other = await asyncio.gather(part(), part())
            return one + other

        return asyncio.run(both())

    step = xd.compile(function)
    assert values(step, lambda: scale.__setitem__(0, 3.0)) == [4, 6]


def test_modules_of_made_up_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many are loaded, which they are is compared, and not what is in them."""
    monkeypatch.setattr(walk, "_MANY_MODULES", 0)
    module, other = types.ModuleType("made_up_name"), types.ModuleType("made_up_name")
    monkeypatch.setattr(module, "scale", 2.0, raising=False)
    monkeypatch.setattr(other, "scale", 4.0, raising=False)
    monkeypatch.setitem(sys.modules, "made_up_name", module)
    name = ["made_up"]

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * importlib.import_module(f"{name[0]}_name").scale

    step = xd.compile(function)
    assert values(step, lambda: setattr(module, "scale", 3.0)) == [2.0, 2.0]
    assert values(step, lambda: sys.modules.update(made_up_name=other))[1] == 4.0
    stale_for_the_audit(function, lambda: setattr(other, "scale", 5.0))


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_another_implementation_of_an_operator() -> None:
    """torch's dispatcher, which is C++, keeps what `torch.library.Library.impl` was given. (What
    that reads is watched.)"""
    library = torch.library.Library("xla_dtensor_not_watched", "DEF")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", lambda x: x * 2, "CompositeImplicitAutograd")
    operator = torch.ops.xla_dtensor_not_watched.scaled
    other = torch.library.Library("xla_dtensor_not_watched", "IMPL")

    def function(x: torch.Tensor) -> torch.Tensor:
        return operator(x)

    def change() -> None:
        other.impl("scaled", lambda x: x * 3, "CompositeImplicitAutograd", allow_override=True)

    try:
        assert values(xd.compile(function), change) == [2, 2]
    finally:
        other._destroy()
        library._destroy()


def test_hooks_of_autograds_nodes() -> None:
    """Another one. (What those read that were there is watched.)"""
    weight = torch.ones(2, device="xla", requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        (weight * x).sum().backward()
        return weight.grad * 1  # type: ignore[operator]

    node = weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    hook = lambda grads: (grads[0] * 3,)
    assert values(xd.compile(function), lambda: node.register_prehook(hook)) == [1, 1]


Case = tuple[Callable[..., Any], Callable[[], Any]]


def text_of_xml() -> Case:
    element = ElementTree.fromstring("<scale>2</scale>")
    return lambda x: x * float(element.text), lambda: setattr(element, "text", "3")


def what_a_cache_forgets() -> Case:
    @functools.lru_cache(maxsize=4)
    def doubled(n: float) -> float:
        return n * 2

    function = lambda x: x * doubled(1.0) * doubled.cache_info().currsize
    return function, lambda: doubled(7.0)


def locals_of_a_suspended_generator() -> Case:
    def counting() -> Iterator[None]:
        n = 1.0
        while True:
            n += 1
            yield

    counter = counting()
    next(counter)
    return lambda x: x * counter.gi_frame.f_locals["n"], lambda: next(counter)


KIND: Any = int


class Config:
    k: KIND


def meaning_of_an_annotation() -> Case:
    globals().update(KIND=int)
    function = lambda x: x * (2 if typing.get_type_hints(Config)["k"] is int else 3)
    return function, lambda: globals().update(KIND=float)


def attribute_of_a_gradient() -> Case:
    weight = torch.ones(2, device="xla", requires_grad=True)
    weight.grad = torch.ones(2, device="xla")
    weight.grad.scale = 2.0  # type: ignore[attr-defined]
    return lambda x: x * weight.grad.scale, lambda: setattr(weight.grad, "scale", 3.0)


def mark_of_a_parameter() -> Case:
    tensor = torch.ones(2, device="xla")
    function = lambda x: x * (2 if isinstance(tensor, torch.nn.Parameter) else 3)
    return function, lambda: setattr(tensor, "_is_param", True)


def slot_of_a_librarys_object() -> Case:
    spline = CubicSpline([0.0, 1.0, 2.0], [0.0, 1.0, 4.0])
    return lambda x: x * float(spline(0.5)), lambda: spline.c.fill(3.0)


# What each shows after the change, of a step that was traced before it.
STALE: dict[Callable[[], Case], float] = {
    text_of_xml: 2.0,
    what_a_cache_forgets: 2.0,
    locals_of_a_suspended_generator: 2.0,
    meaning_of_an_annotation: 2.0,
    attribute_of_a_gradient: 2.0,
    mark_of_a_parameter: 3.0,
    slot_of_a_librarys_object: 0.25,
}


@pytest.mark.parametrize("make", STALE, ids=lambda make: make.__name__)
def test_a_change_that_nobody_is_told_of(make: Callable[[], Case]) -> None:
    function, change = make()
    assert values(xd.compile(function), change) == [STALE[make]] * 2
    stale_for_the_audit(*make())


def test_what_a_backward_pass_outside_reads() -> None:
    """It ran when the step was traced. (Between two calls changes are seen.)"""
    scale = [2.0]

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * scale[0]

    step = xd.compile(lambda x: Scaled.apply(x).sum())
    x = torch.ones(2, device="xla", requires_grad=True)
    found = []
    for late in (3.0, 4.0):
        x.grad = None
        loss = step(x)
        scale[0] = late
        loss.backward()
        found.append(x.grad[0].item())
    assert found == [2.0, 3.0]


def test_frames_around_a_step() -> None:
    """In a trace they are this package's."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (1 if inspect.currentframe().f_back.f_code is caller.__code__ else 2)

    def caller(run: Callable[..., Any]) -> Any:
        return run(torch.ones(2, device="xla"))

    assert caller(function)[0].item() == 1
    assert caller(xd.compile(function))[0].item() == 2


def test_threads_of_autograd() -> None:
    """In a trace it has none but the step's."""
    function = lambda x: x * (1 if torch._C._is_multithreading_enabled() else 2)
    assert function(torch.ones(2, device="xla"))[0].item() == 1
    assert xd.compile(function)(torch.ones(2, device="xla"))[0].item() == 2


def test_writing_to_the_hosts_memory_by_its_address() -> None:
    """While the step is traced, and never again."""
    table = torch.zeros(1)

    def function(x: torch.Tensor) -> torch.Tensor:
        ctypes.memset(table.data_ptr(), 1, 4)
        return x * 2

    step = xd.compile(function)
    step(torch.ones(2, device="xla"))
    assert table[0] != 0
    table.zero_()
    step(torch.ones(2, device="xla"))
    assert table[0] == 0


def test_what_is_put_where_a_library_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step doesn't name it: `dumps` does, far below."""
    function = lambda x: x * float(json.dumps(2.0))
    change = lambda: monkeypatch.setattr(json.encoder.JSONEncoder, "encode", lambda *args: "3.0")
    assert values(xd.compile(function), change) == [2.0, 2.0]


def test_subclasses_of_builtins() -> None:
    """All classes of the process are below `object`, and those that the step makes."""

    class Pair(typing.NamedTuple):
        first: torch.Tensor

    class Base:
        pass

    def function(x: torch.Tensor) -> torch.Tensor:
        known = len(Base.__subclasses__())
        return Pair(
            x * (1.0 + known + len(Pair.__subclasses__()) * 0 + len(int.__subclasses__()))
        ).first

    step, made = xd.compile(function), list[type]()
    before, after = values(step, lambda: made.append(type("Count", (int,), {})))
    assert after == before  # not watched
    assert values(step, lambda: made.append(type("One", (Base,), {})))[1] == before + 2
    assert step.traces == 2
    stale_for_the_audit(function, lambda: made.append(type("Other", (int,), {})))
