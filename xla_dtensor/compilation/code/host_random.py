"""Refuses steps that draw random numbers in Python (``random``, NumPy): they would be constants.

That a generator has moved while a step was traced says so, where there is one thread. Where there
are others (a data loader's), the step is traced again, looking at its own thread alone (`OWN`).
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from xla_dtensor.compilation.code import lasting
from xla_dtensor.compilation.code.threads import others_run
from xla_dtensor.errors import DataDependentError

OWN: contextvars.ContextVar[bool] = contextvars.ContextVar("OWN", default=False)
"""Whether traces tell what their own thread draws from what others do."""


class MaybeAnotherThread(Exception):
    """A generator has moved, and there are other threads."""


class _Generator:
    """One generator of random numbers.

    Attributes:
        source: the object.
        name: in messages.
    """

    def __init__(self, source: Any, name: str) -> None:
        self.source, self.name = source, name
        self.bits: Any = getattr(source, "bit_generator", None)
        if self.bits is None:
            self.bits = getattr(source, "_bit_generator", None)

    def state(self) -> Any:
        """Its state, to be compared by ``repr``."""
        if isinstance(self.source, random.Random):
            return self.source.getstate()
        if isinstance(self.source, np.random.RandomState):
            name, keys, *rest = self.source.get_state()
            return (name, np.asarray(keys).tolist(), *rest)
        return self.bits.state

    def restore(self, state: Any) -> None:
        """Put a state back."""
        if isinstance(self.source, random.Random):
            self.source.setstate(state)
        elif isinstance(self.source, np.random.RandomState):
            self.source.set_state(state)
        else:
            self.bits.state = state

    def lock(self) -> Any:
        """What NumPy holds while it draws, if this thread may hold it and draw."""
        lock = getattr(self.bits, "lock", None)
        return lock if isinstance(lock, type(threading.RLock())) else None


def _generators(sources: list[Any]) -> list[_Generator]:
    found = [
        _Generator(random.random.__self__, "Python's random module"),  # type: ignore[attr-defined]
        _Generator(np.random.mtrand._rand, "numpy.random"),
    ]
    names = {np.random.RandomState: "a numpy RandomState", np.random.Generator: "a numpy Generator"}
    for source in sources:
        if all(known.source is not source for known in found):
            found.append(_Generator(source, names.get(type(source), "a random.Random")))
    return found


@contextlib.contextmanager
def none_drawn(sources: list[Any]) -> Iterator[None]:
    """Refuse a step that draws random numbers in Python.

    Args:
        sources: generators that it may draw from, apart from the global ones.

    Raises:
        DataDependentError: it has drawn some.
        MaybeAnotherThread: it has, or another thread.
    """
    generators = _generators(sources)
    if OWN.get():
        with _none_drawn_here(generators):
            yield
        return
    alone = not others_run()
    before = [generator.state() for generator in generators]

    def moved() -> list[_Generator]:
        """Those that have moved; where that was this thread, they are put back."""
        found = [
            (generator, state)
            for generator, state in zip(generators, before, strict=True)
            if repr(state) != repr(generator.state())
        ]
        if alone and not others_run():
            for generator, state in found:
                generator.restore(state)
        return [generator for generator, _ in found]

    try:
        yield
    except BaseException:
        found = moved()
        if found and (not alone or others_run()):
            lasting.note(_draws(found[0]))
        raise
    found = moved()
    if found:
        if not alone or others_run():
            raise MaybeAnotherThread
        raise _refused(found[0])


@contextlib.contextmanager
def _none_drawn_here(generators: list[_Generator]) -> Iterator[None]:
    """The same of this thread alone. What it has drawn stays drawn: others may have, too."""
    locked = [(g, g.lock()) for g in generators]
    drawn: list[_Generator] = []
    with contextlib.ExitStack() as stack:
        for _, lock in locked:
            if lock is not None:  # other threads that draw wait
                stack.enter_context(lock)
        before = [None if lock is None else repr(g.state()) for g, lock in locked]
        python = {id(g.source): g for g, _ in locked if isinstance(g.source, random.Random)}
        # A NumPy whose lock can't be held counts what any thread draws.
        unknown = [(g, repr(g.state())) for g, k in locked if k is None and g.bits is not None]
        try:
            with _calls(python, drawn.append):
                yield
        finally:
            for (generator, lock), state in zip(locked, before, strict=True):
                if lock is not None and repr(generator.state()) != state:
                    drawn.append(generator)
            drawn += [g for g, state in unknown if repr(g.state()) != state]
            if drawn:
                lasting.note(_draws(drawn[0]))
    if drawn:
        raise _refused(drawn[0])


@contextlib.contextmanager
def _calls(owners: dict[int, Any], found: Callable[[Any], None]) -> Iterator[None]:
    """Tell of every method of ``owners`` (by ``id``) that this thread calls."""
    outer: Any = sys.getprofile()

    def seen(frame: Any, event: str, argument: Any) -> None:
        called, name = None, ""
        if event == "c_call":
            called, name = getattr(argument, "__self__", None), argument.__name__
        elif event == "call" and frame.f_code.co_filename == random.__file__:
            # random.gauss() makes two numbers at a time: the second one is had without a call of C.
            called, name = frame.f_locals.get("self"), frame.f_code.co_name
        owner = None if called is None else owners.get(id(called))
        if owner is not None and name not in ("getstate", "__reduce__"):
            found(owner)
        if outer is not None:
            outer(frame, event, argument)

    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(outer)


def _draws(generator: _Generator) -> str:
    return f"draws random numbers from {generator.name}"


def _refused(generator: _Generator) -> DataDependentError:
    return DataDependentError(
        f"the step {_draws(generator)}: that would happen when it is "
        "traced, not in every call; draw them outside and pass them as arguments, or draw them on "
        "the device with torch"
    )
