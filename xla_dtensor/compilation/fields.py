"""Numbers in attributes of dataclasses that are arguments of a step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol


class NumberLeft(Exception):
    """A symbolic number is still there after the step: in an object that it returns, in a cache."""


class Owner(Protocol):
    """What this needs of `Arguments`."""

    numbers: dict[int, int | float]

    def _part(self, value: Any, path: str) -> Any: ...


class NumberFields:
    """Where the numbers are that one call's arguments keep in attributes of dataclasses. They are
    known by positions below 0, in the order in which they were found."""

    def __init__(self) -> None:
        self._found: list[tuple[Any, str, str]] = []
        self._objects: dict[int, int] = {}

    def part(self, value: Any, fields: dict[str, Any], path: str, owner: Owner) -> tuple[Any, Any]:
        """The part of the key for an object that is its ``fields``."""
        # Two that are one object are so in each call of a program.
        which = self._objects.setdefault(id(value), len(self._objects))
        own = getattr(value, "__dict__", {}) if dataclasses.is_dataclass(value) else {}
        parts = []
        for name, inner in fields.items():
            if (type(inner) is float or type(inner) is int) and name in own:
                self._found.append((value, name, f"{path}.{name}"))
                owner.numbers[-len(self._found)] = inner
                parts.append((name, type(inner)))
            else:
                parts.append((name, owner._part(inner, f"{path}.{name}")))
        return which, tuple(parts)

    def name(self, position: int) -> str:
        """How messages call the number."""
        return self._found[-1 - position][2]

    @contextlib.contextmanager
    def planted(self, numbers: dict[int, Any]) -> Iterator[None]:
        """Let the attributes be other numbers for a block. Then all attributes of those objects
        are what they were.

        Raises:
            NumberLeft: the step has assigned one of them: that is for a trace without such numbers.
        """
        own: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        for position, (value, name, _) in enumerate(self._found, 1):
            if -position in numbers:
                before = dict(vars(value))
                vars(value)[name] = numbers[-position]
                own.append((vars(value), before, dict(vars(value))))
        assigned = False
        try:
            yield
        finally:
            for now, before, planted in reversed(own):
                assigned |= now.keys() != planted.keys() or any(
                    now[name] is not planted[name] for name in planted
                )
                now.clear()
                now.update(before)
        if assigned:
            raise NumberLeft("the step assigns attributes of an argument that has numbers")
