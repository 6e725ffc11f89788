"""How messages call what a step is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xla_dtensor.compilation.kinds import kind_of


def paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """How to call everything that arguments consist of, in order; and whether it is a leaf."""
    seen: set[int] = set()

    def visit(path: str, value: Any) -> Iterator[tuple[str, Any, bool]]:
        kind = kind_of(value)
        if kind is not None and id(value) in seen:
            return
        yield path, value, kind is None
        if kind is None:
            return
        seen.add(id(value))
        spots = kind.spots(value, path)
        for part, (place, key) in zip(kind.split(value)[1], spots, strict=True):
            yield from visit(place.label(key), part)

    for i, value in enumerate(args):
        yield from visit(f"argument [{i}]", value)
    for name, value in kwargs.items():
        yield from visit(f"argument keyword [{name!r}]", value)
