"""Names of a step's arguments in messages: ``argument [0].scale``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xla_dtensor.compilation.objects.global_state import STATE, text_of
from xla_dtensor.compilation.objects.kinds import kind_of
from xla_dtensor.tensors.of_form import is_ours

OTHER = "an argument"


def paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """What arguments consist of, in order: (name in messages, part, whether it is a leaf)."""
    seen: set[int] = set()
    for i, value in enumerate(args):
        yield from _visit(f"argument [{i}]", value, seen)
    for name, value in kwargs.items():
        yield from _visit(f"argument keyword [{name!r}]", value, seen)


def paths_by_id(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, str]:
    """The same by the ``id`` of what is called so."""
    return {id(value): path for path, value, _ in paths(args, kwargs)}


def _visit(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any, bool]]:
    kind = kind_of(value)
    if kind is not None and id(value) in seen:
        return
    yield path, value, kind is None
    if kind is None:
        return
    seen.add(id(value))
    spots = kind.spots(value, path)
    for part, (place, key) in zip(kind.split(value)[1], spots, strict=True):
        yield from _visit(place.label(key), part, seen)


def lying(value: Any, frame: Any) -> str:
    """A tensor with the devices that it lies on and what it is a view of, where nothing else tells
    it from another."""
    text = f"{text_of(value)} on {frame or 'the default device'}"
    if not value._steps:
        return text
    memory = value._storage_.form
    placed = "" if memory.placements is None else f" {list(memory.placements)}"
    return f"{text}, a view of {list(memory.shape)}{placed}"


def difference(mine: Any, other: Any, names: list[str], carried_names: list[str]) -> str | None:
    """What differs between two calls, in words; None if nothing but numbers does.

    Args:
        mine, other: the `Arguments`.
        names, carried_names: the names of the first one's values.
    """
    if mine.key[0] != other.key[0]:
        return "the arguments have another structure"
    for name, own, theirs, now, before in zip(
        names, mine.key[1], other.key[1], mine.values, other.values, strict=False
    ):
        if own != theirs:
            texts = text_of(before), text_of(now)
            if texts[0] == texts[1] and is_ours(now) and is_ours(before):
                texts = lying(before, before._form.frame), lying(now, now._form.frame)
            if texts[0] == texts[1] and is_ours(now):
                return f"{name}: from {texts[0]} to another one"
            return f"{name}: from {texts[0]} to {texts[1]}"
    if mine.key[2] != other.key[2]:
        return "which of the arguments share memory"
    if mine.key[3] != other.key[3]:
        for name, now, before in zip(STATE, mine.key[3], other.key[3], strict=True):
            if now != before:
                return f"{name}: from {before} to {now}"
    if mine.carried != other.carried:
        now, before = mine.values[len(mine.key[1]) :], other.values[len(mine.key[1]) :]
        for name, own, theirs in zip(carried_names, now, before, strict=False):
            if text_of(own) != text_of(theirs):
                return f"{name}: from {text_of(theirs)} to {text_of(own)}"
        return "what the step keeps from one call to the next"
    return None
