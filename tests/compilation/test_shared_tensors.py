"""Threads that call different compiled steps on the same tensors: one after the other."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from xla_dtensor.compilation.program import executable
from xla_dtensor.compilation.program.guards import Guards
from xla_dtensor.compilation.program.input_layouts import compile_somehow
from xla_dtensor.compilation.step import compiled_step
from xla_dtensor.compilation.step.audit import compare
from xla_dtensor.compilation.trace.first_calls import FirstCall

Pause = Callable[[str], None]


def adding(what: str, device: str, pause: Pause) -> tuple[list[Callable[[], None]], torch.Tensor]:
    """Two steps that add 1 and 2 to the same tensor, which may be on the CPU, or to its gradient,
    which the second may clear in place of that; and the tensor."""
    on, of_gradients = "cpu" if what == "on the CPU" else device, what in ("gradients", "cleared")
    kept = torch.zeros(8, device=on, requires_grad=of_gradients)
    if what == "cleared":
        kept.sum().backward()
    other = torch.zeros(8, device=device)

    def add(number: int, pause: Pause) -> None:
        pause("before")
        if not of_gradients:
            if what == "tensors":
                other.add_(kept)
            pause("between")
            kept.add_(number)
        elif what == "cleared" and number == 2:
            kept.grad = None
        else:
            (kept.sum() * number).backward()
        pause("behind")

    return [lambda: add(1, pause), lambda: add(2, lambda _: None)], kept


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", ["tensors", "on the CPU", "gradients", "cleared"])
@pytest.mark.parametrize("where", ["before", "between", "behind", "compiled", "guarded"])
@pytest.mark.parametrize("steady", ["neither", "the second", "both"])
def test_two_steps_that_write_the_same(
    monkeypatch: pytest.MonkeyPatch, what: str, where: str, steady: str
) -> None:
    """One after the other, wherever the first one is when another thread calls the second."""
    begin, over = threading.Event(), threading.Event()

    def pause(here: str) -> None:
        if here == where and threading.current_thread() is threading.main_thread():
            begin.set()
            over.wait(0.5)

    def paused(here: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            pause(here)
            return result

        return call

    def call_the_second() -> None:
        begin.wait()
        try:
            second()
        except BaseException as error:
            errors.append(error)
        over.set()

    def prepare(first: Callable[[], None], second: Callable[[], None], kept: torch.Tensor) -> None:
        if steady == "both":
            first()
        if steady != "neither":
            second()
        if steady == "both":
            kept.grad = None
        if what == "cleared":
            kept.sum().backward()

    def value(kept: torch.Tensor) -> Any:
        found = kept.grad if what in ("gradients", "cleared") else kept
        return None if found is None else found.tolist()

    errors: list[BaseException] = []
    functions, found = adding(what, "xla", pause)
    first, second = map(xd.compile, functions)
    prepare(first, second, found)
    monkeypatch.setattr(executable, "compile_somehow", paused("compiled", compile_somehow))
    monkeypatch.setattr(Guards, "mismatch", paused("guarded", Guards.mismatch))
    other = threading.Thread(target=call_the_second, daemon=True)
    other.start()
    first()
    begin.set()
    other.join()
    assert not errors, errors
    expected = []
    for order in ((0, 1), (1, 0)):
        functions, kept = adding(what, "cpu", lambda _: None)
        prepare(*functions, kept)
        for i in order:
            functions[i]()
        expected.append(value(kept))
    assert value(found) in expected


@contextmanager
def a_first_call(function: Callable[[], Any], error: type[Exception] | None) -> Iterator[Any]:
    """Another thread, which is in the middle of tracing ``function`` while the block runs, until
    the block sets the event that it is given; and the step."""
    inside, go_on = threading.Event(), threading.Event()

    def call() -> None:
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            step()

    def traced() -> None:
        function()
        inside.set()
        go_on.wait()
        if error is not None:
            raise error("as it was told")

    step = xd.compile(traced)
    other = threading.Thread(target=call)
    other.start()
    inside.wait()
    try:
        yield go_on, step
    finally:
        go_on.set()
        other.join()


def waiting(thread: threading.Thread) -> bool:
    """Whether a thread waits for another one's first call."""
    return sys._current_frames()[thread.ident].f_code is FirstCall.wait.__code__  # type: ignore[index]


def once_it_waits(work: Callable[[], Any]) -> threading.Thread:
    """A thread that does ``work`` when the main one waits for another thread's first call."""

    def look() -> None:
        while not waiting(threading.main_thread()):
            time.sleep(1e-3)
        work()

    other = threading.Thread(target=look)
    other.start()
    return other


def test_a_step_goes_on_when_a_first_call_has_failed() -> None:
    functions, found = adding("tensors", "xla", lambda _: None)
    second = xd.compile(functions[1])
    second()
    with a_first_call(functions[0], ZeroDivisionError) as (go_on, _):
        other = once_it_waits(go_on.set)
        second()
        other.join()
    assert found.tolist() == [4] * 8


def test_an_interrupt_while_a_step_waits() -> None:
    """At once: nothing has happened, and nobody waits for what it has left."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    functions, found = adding("tensors", "xla", lambda _: None)
    second = xd.compile(functions[1])
    second()
    try:
        with a_first_call(functions[0], None) as (go_on, _):
            other = once_it_waits(
                lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
            )
            with pytest.raises(KeyboardInterrupt):
                second()
            other.join()
            assert not go_on.is_set()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert found.tolist() == [3] * 8
    second()
    assert found.tolist() == [5] * 8


def test_a_step_that_has_nothing_to_do_with_it_does_not_wait() -> None:
    functions, found = adding("tensors", "xla", lambda _: None)
    others = adding("tensors", "xla", lambda _: None)
    step = xd.compile(others[0][1])
    step()
    with a_first_call(functions[0], None):
        step()
        assert others[1].tolist() == [4] * 8
    assert found.tolist() == [1] * 8


PACKAGE = """
class Holder: pass
holder = Holder()
def add(y):
    y.add_(1)
    return holder.x.add_(y)
"""


def test_a_second_attempt_that_reaches_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A trace comes to an installed package, is made again, and finds there what a program that is
    compiled writes to; which in turn uses what the first attempt may write to."""
    (tmp_path / "package_that_adds").mkdir()
    (tmp_path / "package_that_adds" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "package_that_adds-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("package_that_adds")
    x, y = torch.zeros(4, device="xla"), torch.zeros(4, device="xla")
    package.holder.x = x
    first, second = xd.compile(lambda: x.add_(y)), xd.compile(lambda: package.add(y))
    other = threading.Thread(target=second, daemon=True)

    def compile_while_the_other_waits(*args: Any, **kwargs: Any) -> Any:
        if not other.ident:
            other.start()
            while not waiting(other):
                time.sleep(1e-3)
        return compile_somehow(*args, **kwargs)

    monkeypatch.setattr(executable, "compile_somehow", compile_while_the_other_waits)
    main = threading.Thread(target=first, daemon=True)
    for thread in (main, other):
        if thread is main:
            thread.start()
        thread.join(20)
        assert not thread.is_alive()
    del sys.modules["package_that_adds"]
    assert x.tolist() == y.tolist() == [1] * 4


def test_an_audit_while_another_step_changes_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace of an audit begins with another gradient than the program that it audits needs."""
    weight = torch.ones(4, device="xla", requires_grad=True)
    step = xd.compile(lambda: weight.sum().backward(), audit=2)
    other = xd.compile(lambda: (weight * 2).sum().backward())
    for call in (other, step, step):
        weight.grad = None
        call()
    weight.grad = None
    others = iter([threading.Thread(target=other)])

    def compare_behind_the_other(*args: Any) -> None:
        for thread in others:
            thread.start()
            thread.join()
        compare(*args)

    monkeypatch.setattr(compiled_step, "compare", compare_behind_the_other)
    step()
    assert next(others, None) is None
    assert weight.grad is not None and weight.grad.tolist() == [3] * 4


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("eagerly", ["adds", "clears"])
def test_eager_gradients_while_a_step_that_reads_weights_is_traced(
    eagerly: str, has_gradient: bool
) -> None:
    """They are the other thread's: nothing is put back, and no later call of the step does it."""

    def made(device: str) -> tuple[torch.Tensor, Callable[[], None]]:
        weight = torch.ones(4, device=device, requires_grad=True)
        if has_gradient:
            weight.sum().backward()

        def change() -> None:
            weight.grad = None
            if eagerly == "adds":
                weight.sum().backward()

        return weight, change

    (weight, change), (expected, change_expected) = made("xla"), made("cpu")
    with a_first_call(torch.no_grad()(lambda: weight.sum()), None) as (_, evaluate):
        change()
    change_expected()
    for _ in range(2):
        found = [None if t.grad is None else t.grad.tolist() for t in (weight, expected)]
        assert found[0] == found[1]
        (weight.sum() * 2).backward(), (expected.sum() * 2).backward()
        evaluate()
