"""Iterators that a step mustn't take from."""

from __future__ import annotations

import contextlib
import itertools
import types
import warnings
from collections.abc import Iterator
from typing import Any

from xla_dtensor.compilation.objects.found import content_of
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
    before = [_iterator_state(iterator) for iterator, _ in iterators]
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
        if _iterator_state(iterator) != state or (state is UNKNOWN and watch.names.calls("next")):
            raise DataDependentError(
                f"the step takes the next element of {path}, a {type(iterator).__name__}: that "
                "would happen when it is traced, not in every call; take it outside, and pass it "
                "as an argument"
            )


UNKNOWN = object()


def _iterator_state(iterator: Any) -> Any:
    """How far an iterator has come, without moving it."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else frame.f_lasti
    hint = getattr(iterator, "__length_hint__", None)
    if hint is not None:
        return hint()
    yielded = getattr(iterator, "_num_yielded", None)  # a DataLoader's
    if yielded is not None:
        return yielded
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.14 can't copy or pickle them any more
        try:
            parts = iterator.__reduce__()
        except TypeError:
            return UNKNOWN
    if isinstance(parts, str):
        return UNKNOWN
    states = [
        _iterator_state(x) if hasattr(x, "__next__") else repr(x)
        for part in parts[1:]
        if isinstance(part, tuple)
        for x in part
    ]
    return UNKNOWN if UNKNOWN in states else states
