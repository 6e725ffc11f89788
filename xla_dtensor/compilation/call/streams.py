"""Iterators among a step's arguments: their elements are taken before the call, as its inputs.

A trace can't run the Python of a generator, whose operations would become the step's. So what the
step takes is taken before: one element more for each trace that comes to its end, as many as the
last call has needed from then on.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.objects.kinds_of_code import ITERATORS, IteratorArgument, NeedsMore

_TYPES = frozenset((types.GeneratorType, *ITERATORS))


def has_streams(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there are iterators among the arguments."""
    return not _TYPES.isdisjoint(map(type, args)) or (
        bool(kwargs) and not _TYPES.isdisjoint(map(type, kwargs.values()))
    )


def call_with_streams(
    call: Callable[[Arguments], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: Callable[[tuple[Any, ...], dict[str, Any]], Arguments],
    taken: dict[Any, list[tuple[int, bool]]],
) -> Any:
    """``call`` with the arguments, whose iterators have been taken from as far as it needs.

    Args:
        made: makes `Arguments`, by what is known of the step.
        taken: how many elements the last call has needed, and whether all, by the key of the rest.
    """
    streams: dict[int, IteratorArgument] = {}

    def stream(value: Any) -> Any:
        if type(value) not in _TYPES:
            return value
        return streams.setdefault(id(value), IteratorArgument(value))

    args = tuple(map(stream, args))
    kwargs = {name: stream(value) for name, value in kwargs.items()}
    found = list(streams.values())
    key = made(args, kwargs).key
    for one, (count, all_of_it) in zip(found, taken.get(key, ()), strict=False):
        while not one.ended and (all_of_it or len(one.elements) < count):
            one.pull()
    while True:
        arguments = made(args, kwargs)
        try:
            result = call(arguments)
        except NeedsMore as more:
            more.stream.pull()
            continue
        taken[key] = [(len(one.elements), one.ended) for one in found]
        return result
