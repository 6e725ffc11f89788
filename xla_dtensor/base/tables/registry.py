"""Registries of objects by name, which call listeners when something is registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

V = TypeVar("V")


class Changes:
    """Those who are told when something is registered: what they have made of it is out of date."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], object]] = []

    def listen(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` after every change."""
        self._listeners.append(listener)

    def tell(self) -> None:
        """Something has changed."""
        for listener in self._listeners:
            listener()


class Registry(dict[str, V]):
    """Things by name.

    Args:
        what: what one of them is, for the error.
        changes: is told of each that is added; several registries may share one.

    Example::

        lowerings = Registry("lowering", changes)
        lowerings.add("aten::relu.default", relu)
    """

    def __init__(self, what: str, changes: Changes) -> None:
        super().__init__()
        self.what, self.changes = what, changes

    def add(self, name: str, value: V, *, override: bool = False) -> None:
        """Register ``value``.

        Raises:
            ValueError: the name is taken, and ``override`` isn't set.
        """
        if name in self and not override:
            raise ValueError(f"{name} already has a {self.what}")
        self[name] = value
        self.changes.tell()

    def copy(self) -> Registry[V]:
        """The same content in a registry of its own; the same ones are told."""
        result: Registry[V] = Registry(self.what, self.changes)
        result.update(self)
        return result
