"""Threads that call different compiled steps on the same tensors: one after the other."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from xla_dtensor.compilation.program import executable
from xla_dtensor.compilation.program.guards import Guards
from xla_dtensor.compilation.program.input_layouts import compile_somehow
from xla_dtensor.compilation.trace.first_calls import FirstCall

Pause = Callable[[str], None]


def adding(what: str, device: str, pause: Pause) -> tuple[list[Callable[[], None]], torch.Tensor]:
    """Two steps that add 1 and 2 to the same tensor, or to its gradient, and that tensor."""
    kept = torch.zeros(8, device=device, requires_grad=what == "gradients")
    other = torch.zeros(8, device=device)

    def add(number: int, pause: Pause) -> None:
        pause("before")
        if what == "tensors":
            other.add_(kept)
            pause("between")
            kept.add_(number)
        else:
            (kept.sum() * number).backward()
        pause("behind")

    return [lambda: add(1, pause), lambda: add(2, lambda _: None)], kept


@pytest.mark.parametrize("what", ["tensors", "gradients"])
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

    errors: list[BaseException] = []
    functions, found = adding(what, "xla", pause)
    first, second = map(xd.compile, functions)
    (add, add_more), expected = adding(what, "cpu", lambda _: None)
    if steady == "both":
        first(), add()
    if steady != "neither":
        second(), add_more()
    if steady == "both":
        found.grad = expected.grad = None
    monkeypatch.setattr(executable, "compile_somehow", paused("compiled", compile_somehow))
    monkeypatch.setattr(Guards, "mismatch", paused("guarded", Guards.mismatch))
    other = threading.Thread(target=call_the_second)
    other.start()
    first()
    begin.set()
    other.join()
    add(), add_more()
    assert not errors, errors
    value = lambda t: (t if what == "tensors" else t.grad).tolist()
    assert value(found) == value(expected)


@contextmanager
def a_first_call(function: Callable[[], Any], error: type[Exception] | None) -> Iterator[Any]:
    """Another thread, which is in the middle of tracing ``function`` while the block runs, until
    the block sets the event that it is given."""
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
        yield go_on
    finally:
        go_on.set()
        other.join()


def once_it_waits(work: Callable[[], Any]) -> threading.Thread:
    """A thread that does ``work`` when the main one waits for another thread's first call."""
    main = threading.main_thread().ident

    def look() -> None:
        while sys._current_frames()[main].f_code is not FirstCall.wait.__code__:  # type: ignore[index]
            time.sleep(1e-3)
        work()

    other = threading.Thread(target=look)
    other.start()
    return other


def test_a_step_goes_on_when_a_first_call_has_failed() -> None:
    functions, found = adding("tensors", "xla", lambda _: None)
    second = xd.compile(functions[1])
    second()
    with a_first_call(functions[0], ZeroDivisionError) as go_on:
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
        with a_first_call(functions[0], None) as go_on:
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
