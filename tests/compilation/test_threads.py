"""Steps that are traced while other threads draw random numbers and change what the step reads."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.base import interrupts

GENERATOR = np.random.default_rng(0)
PYTHON = random.Random(0)


@contextmanager
def thread(work: Callable[[], Any]) -> Iterator[None]:
    """Another thread, which does ``work`` again and again, at least once inside of the block."""
    stop, worked = threading.Event(), threading.Event()

    def run() -> None:
        while not stop.is_set():
            work()
            worked.set()
            time.sleep(1e-4)

    other = threading.Thread(target=run)
    other.start()
    try:
        worked.wait()
        yield
    finally:
        stop.set()
        other.join()


def draw() -> None:
    random.random()
    PYTHON.random()
    np.random.rand()
    GENERATOR.random()


@pytest.fixture
def x(mesh_2x4: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(torch.arange(8.0), mesh_2x4, [Shard(0), Replicate()])


def test_another_thread_draws(x: torch.Tensor) -> None:
    """As a data loader's does: that isn't the step's doing."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if GENERATOR is not PYTHON else x

    with thread(draw):
        step = xd.compile(function)
        for _ in range(3):
            torch.testing.assert_close(step(x).full_tensor().cpu(), torch.arange(8.0) * 2)
    assert step.traces == 1


DRAWS: dict[str, tuple[Callable[[], float], str]] = {
    "random": (random.random, "Python's random module"),
    "choice": (lambda: random.choice([1.0, 2.0]), "Python's random module"),
    "own": (lambda: PYTHON.gauss(0, 1), "a random.Random"),
    "numpy": (lambda: float(np.random.rand()), "numpy.random"),
    "normal": (lambda: float(np.random.normal()), "numpy.random"),
    "generator": (lambda: float(GENERATOR.random()), "a numpy Generator"),
}


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_the_step_draws(x: torch.Tensor, name: str, idle: bool) -> None:
    """It is refused, whatever other threads do."""
    number, where = DRAWS[name]
    step = xd.compile(lambda x: x * number())
    other = thread(threading.Event().is_set if idle else draw)
    with other, pytest.raises(xd.DataDependentError, match=where):
        step(x)


def test_drawn_numbers_are_kept(x: torch.Tensor) -> None:
    """What another thread has drawn isn't drawn again."""
    drawn: list[float] = []
    step = xd.compile(lambda x: x * 2)
    with thread(lambda: drawn.append(random.random())):
        step(x)
    assert len(set(drawn)) == len(drawn)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns five hundred times as often as ever: what goes wrong between two lines
    does so here."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("attempt", range(8))
def test_another_thread_counts(x: torch.Tensor, quick_switches: None, attempt: int) -> None:
    """In an attribute that the step reads, and one that it doesn't: it changes others. (A number
    that a call had read a moment before the trace began came back at its end, in one of three.)"""
    metrics = SimpleNamespace(calls=0, seen=0, last=None)

    def work() -> None:
        metrics.calls += 1
        metrics.seen += 1

    def function(x: torch.Tensor) -> torch.Tensor:
        metrics.last = x.sum()
        return x * 2 if metrics.calls >= 0 else x

    step = xd.compile(function)
    counted = []
    with thread(work):
        for _ in range(3):
            before = metrics.calls
            step(x)
            counted.append(before <= metrics.calls)
    assert metrics.calls == metrics.seen > 0
    assert all(counted)
    assert metrics.last.item() == 28.0


def test_another_thread_trains_another_model(x: torch.Tensor) -> None:
    """Of a list that the step reaches: a trace puts back the gradients that are its own doing."""
    models = [torch.nn.Linear(8, 8).to("xla") for _ in range(2)]
    lost: list[int] = []
    given = itertools.count()

    def work() -> None:
        other = models[1].weight
        gradient = torch.full((8, 8), 2.0, device="xla")
        other.grad = gradient
        number = next(given)
        for _ in range(20):
            time.sleep(1e-4)
            if other.grad is not gradient:
                lost.append(number)

    def function(rows: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)  # several of the other thread's gradients
        loss = models[0](rows).square().mean()
        loss.backward()
        return loss

    with thread(work):
        for rows in range(2, 5):
            xd.compile(function)(torch.ones(rows, 8, device="xla"))
    assert next(given) > 3
    assert lost == []


def test_a_queue_to_another_thread(x: torch.Tensor) -> None:
    """As loggers have it: what one thread puts in and another takes out, and who waits for it, is
    no state of the step's. Nothing is lost, and nothing is traced again."""
    waiting: queue.Queue[int] = queue.Queue()
    taken: list[int] = []
    stop = threading.Event()

    class Trainer:
        def __init__(self) -> None:
            self.queue = waiting

        def log(self, number: int) -> None:
            with self.queue.not_empty:
                self.queue.queue.append(number)
                self.queue.not_empty.notify()

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if isinstance(self.queue, queue.Queue) and not stop.is_set() else self.log

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            taken.append(waiting.get(timeout=1))

    trainer = Trainer()
    step = xd.compile(trainer.step)
    trainer.log(-1)
    with thread(work):
        for number in range(20):
            trainer.log(number)
            torch.testing.assert_close(step(x).full_tensor().cpu(), torch.arange(8.0) * 2)
    assert step.traces == 1
    assert [*taken, *waiting.queue] == list(range(-1, 20))


def test_an_interrupt_in_a_trace_is_no_thread_of_the_steps(x: torch.Tensor) -> None:
    """One that has to wait for a better place is sent again, by a thread."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.install()

    reading, writing = os.pipe()  # what the step's Python changes is undone with its trace

    @interrupts.atomic
    def pressed() -> None:
        signal.raise_signal(signal.SIGINT)
        os.write(writing, b"it goes on")

    def function(x: torch.Tensor) -> torch.Tensor:
        pressed()
        return x * 2

    step = xd.compile(function)
    try:
        with pytest.raises(KeyboardInterrupt):
            step(x)
            time.sleep(1)
    finally:
        signal.signal(signal.SIGINT, handler)
    os.close(writing)
    with os.fdopen(reading) as file:
        assert file.read() == "it goes on"


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("mode", ["eager", "replay"])
def test_another_thread_trains_while_a_step_is_traced(
    x: torch.Tensor, mode: str, foreach: bool
) -> None:
    """torch's optimizers compute by other formulas while torch's flag says that it compiles."""

    def slow(y: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)  # the other thread comes to its optimizer
        return y * 2

    def train(p: torch.nn.Parameter, of: Callable[[Any], Any], *between: Callable[[], Any]) -> None:
        optimizer = torch.optim.AdamW([p], lr=0.1, foreach=foreach)

        def step() -> None:
            p.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = of(step)
        for act in (lambda: None, *between, lambda: None):
            act()
            step()

    def trace() -> None:
        others.append(threading.Thread(target=lambda: xd.compile(slow)(x.clone())))
        others[-1].start()
        time.sleep(0.1)

    others: list[threading.Thread] = []
    of: Callable[[Any], Any] = lambda step: step
    if mode == "replay":
        of = lambda step: xd.compile(step, watch="replay")
    ours = torch.nn.Parameter(x.clone())
    train(ours, of, trace, trace)
    for other in others:
        other.join()
    expected = torch.nn.Parameter(torch.arange(8.0))
    train(expected, lambda step: step, lambda: None, lambda: None)
    torch.testing.assert_close(ours.full_tensor().cpu().detach(), expected.detach())


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "filled": lambda t: t.fill_(3),
    "added to": lambda t: t.add_(2),
    "copied to": lambda t: t.copy_(torch.full((8,), 3.0)),
    "by another step": xd.compile(lambda t: t.add_(2).sum()),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("audits", [False, True])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("reads", ["before", "behind", "twice"])
def test_another_thread_writes_to_what_the_traced_step_reads(
    name: str, audits: bool, writes: bool, reads: str
) -> None:
    """The end of the trace took the write back, and what the step had read behind it was refused.
    (Behind the first write of the step, which is traced, nobody else may look at the tensor.)"""
    scale, x, inside = torch.ones(8, device="xla"), torch.ones(8, device="xla"), threading.Event()
    WRITES[name](torch.ones(8, device="xla"))

    def slow(x: torch.Tensor) -> torch.Tensor:
        y = x * scale if reads != "behind" else x
        inside.set()
        time.sleep(0.3)
        if reads != "before":
            y = y + x * scale - x
        if writes:
            scale.mul_(1)
        return y

    step = xd.compile(slow, audit=int(audits))
    if audits:
        step(x)
        inside.clear()
    other = threading.Thread(target=lambda: found.append(step(x).tolist()))
    found: list[list[float]] = []
    other.start()
    inside.wait()
    WRITES[name](scale)
    other.join()
    was, now = (slow_on_cpu(value, reads) for value in (1.0, 3.0))
    assert scale.tolist() == [3] * 8 and step(x).tolist() == now and found[0] in (was, now)


def slow_on_cpu(scale: float, reads: str) -> list[float]:
    """What such a step returns of ones."""
    x = torch.ones(8)
    y = x * scale if reads != "behind" else x
    return (y if reads == "before" else y + x * scale - x).tolist()


def test_a_trace_is_no_change_of_other_steps() -> None:
    """What a trace replaces for itself other threads don't see."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to("xla")
    x = torch.ones(4, 8, device="xla")
    step = xd.compile(lambda x: model(x).sum().detach())
    expected = step(x).item()
    found: list[float] = []
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            found.append(step(x).item())

    other = threading.Thread(target=go_on)
    other.start()
    try:
        for _ in range(5):
            deep = nn.Sequential(*[nn.Linear(8, 8) for _ in range(10)]).to("xla")
            xd.compile(lambda x, deep=deep: deep(x).sum().detach())(x)
    finally:
        over.set()
        other.join()
    assert set(found) == {expected} and step.traces == 1
