"""Refuses steps that take elements from iterators outside of them, or write to NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from xla_dtensor.compilation.code import lasting
from xla_dtensor.compilation.objects.found import content_of
from xla_dtensor.compilation.objects.kinds_of_code import UNKNOWN, state_of_iterator
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.errors import DataDependentError


@contextlib.contextmanager
def nothing_consumed(watch: Watch) -> Iterator[None]:
    """Refuse a step that takes elements from an iterator, or writes to an array of NumPy's: that
    would happen once.

    Raises:
        DataDependentError: it has taken some.
    """
    iterators = watch.reached.consumed
    before = [state_of_iterator(iterator) for iterator, _ in iterators]

    def happened() -> str | None:
        for value, content in watch.reached.arrays:
            if _differs(value, content):
                path = next(found.path for found in watch.reached.found if found.value is content)
                return f"writes to {path} ({type(value).__name__}) outside of it, on the host"
        for (iterator, path), state in zip(iterators, before, strict=True):
            known = state is not UNKNOWN
            if state_of_iterator(iterator) != state or (not known and watch.names.calls("next")):
                return f"takes the next element of {path}, a {type(iterator).__name__}"
        return None

    try:
        yield
    finally:
        what = happened()
        if what is not None:
            lasting.note(what)
    if what is not None:
        raise DataDependentError(
            f"the step {what}: that would happen when it is traced, not in every call; do it "
            "outside, and pass what it gives as an argument (a tensor on the devices), or compile "
            'the step with watch="replay"'
        )


def _differs(value: Any, content: Any) -> bool:
    try:
        return bool(content_of(value) != content)
    except DataDependentError:
        return True  # an array of objects, which holds a number of the trace
