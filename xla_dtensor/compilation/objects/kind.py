"""`ObjectKind`: how objects of some classes are taken apart and rebuilt; the base class."""

from __future__ import annotations

from typing import Any

from xla_dtensor.compilation.code.reflection import all_slots_of, dict_of
from xla_dtensor.compilation.objects.places import MISSING, Attributes, Place, Slots

Spot = tuple[Place, Any]
"""Where a part is: the place, and its key there."""


class ObjectKind:
    """How objects of some classes are taken apart.

    Args:
        inputs: whether numbers in them may be inputs of a program, when they are arguments.

    Attributes:
        needs: how many of its parts must be there before an object can be made; None: all. The
            others are given to it afterwards, so that it may be a part of itself, and can be
            replaced (`spots`).
    """

    needs: int | None = None

    def __init__(self, inputs: bool = False) -> None:
        self.inputs = inputs

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        """What makes another object like ``value``, and its parts."""
        raise NotImplementedError

    def key(self, data: Any) -> Any:
        """What of the first tells two objects with the same parts from each other."""
        return data

    def spots(self, value: Any, path: str) -> list[Spot]:
        """Where each part is."""
        return [unplaced(path)] * len(self.split(value)[1])

    def make(self, data: Any, parts: list[Any]) -> Any:
        """An object around the parts that it needs."""
        raise NotImplementedError

    def fill(self, made: Any, data: Any, parts: list[Any]) -> None:
        """Give an object that has been made all of its parts."""


def unplaced(path: str) -> Spot:
    """Where a part is that can't be replaced."""
    return Slots(None, (), "", shown=path), MISSING


def attribute_spots(value: Any, names: tuple[str, ...], path: str) -> list[Spot]:
    """Where an object's own attributes are: in its dict, or in slots."""
    own = dict_of(value)
    slots = Slots(value, [n for n in names if own is None or n not in own], path)
    attributes = slots if own is None else Attributes(value, path)
    return [(slots if name in slots.keys else attributes, name) for name in names]


def give(made: Any, names: tuple[str, ...], values: list[Any]) -> None:
    """Give an object that has been made its attributes, without running code of its class."""
    own, slots = dict_of(made), all_slots_of(type(made))  # type: ignore[arg-type]
    for name, value in zip(names, values, strict=True):
        if value is MISSING:
            continue
        if own is None or name in slots:
            object.__setattr__(made, name, value)
        else:
            own[name] = value
