"""Refuses steps that take elements from iterators outside of them, or write to NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
    yield
    for value, content in watch.reached.arrays:
        if content_of(value) != content:
            path = next(found.path for found in watch.reached.found if found.value is content)
            raise DataDependentError(
                f"the step writes to {path} ({type(value).__name__}) outside of it, on the host: "
                "that would happen when it is traced, not in every call; use a tensor on the "
                'device, or compile the step with watch="replay"'
            )
    for (iterator, path), state in zip(iterators, before, strict=True):
        if state_of_iterator(iterator) != state or (state is UNKNOWN and watch.names.calls("next")):
            raise DataDependentError(
                f"the step takes the next element of {path}, a {type(iterator).__name__}: that "
                "would happen when it is traced, not in every call; take it outside, and pass it "
                "as an argument"
            )
