"""Effects that a step goes on with: its next call finds what this one has changed."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import torch

from xla_dtensor.compilation.call.recipes import BuiltObject, PendingNumber
from xla_dtensor.compilation.watch.effects import Effect
from xla_dtensor.errors import DataDependentError


def is_counted_on(effect: Effect, carried: frozenset[str], earlier: Iterable[Effect]) -> bool:
    """Whether a step changes what it reads itself, so that its next call finds something else: a
    number, or what it changed when it was traced before, too.

    Args:
        carried: the labels of what each call takes from where it is.
        earlier: the effects of that trace.
    """
    if not effect.place.guarded or effect.labels() <= carried:
        return False
    if any(_is_other_number(effect.before.get(key), now) for key, now in effect.after.items()):
        return True
    return bool(effect.changed() & {key for each in earlier for key in each.changed()})


def _is_other_number(before: Any, after: Any) -> bool:
    if type(before) not in (int, float):
        return False
    if isinstance(after, BuiltObject):  # self.total += loss.item()
        return any(isinstance(part, PendingNumber) for part in after.parts)
    return type(after) is type(before) and before != after


def goes_on(effect: Effect, earlier: Iterable[Effect], changed: Iterable[str]) -> bool:
    """Whether the next call would change the same again: it finds what an ``earlier`` call of the
    step has left there, or it adds to a list or a dict though nothing else has ``changed``. A table
    that is filled on demand is left as it is until something else is asked for; and of the states
    that an enum names, each has a program soon.

    Args:
        earlier: the effects of the trace before.
        changed: the names in messages of all that has changed since.
    """
    values = (*effect.before.values(), *effect.after.values())
    if all(isinstance(value, _OF_FEW) for value in values):
        return False
    same = [each for each in earlier if each.place.container == effect.place.container]
    if any(each.left(key, before) for key, before in effect.before.items() for each in same):
        return True
    if not effect.grows() or not all(each.is_there() for each in same):
        return False
    own = [each.place.path for each in earlier]
    return all(any(_is_within(path, place) for place in own) for path in changed)


_OF_FEW = enum.Enum | bool | None


def _is_within(path: str, place: str) -> bool:
    return path.startswith(place) and path[len(place) :][:1] in ("", ".", "[", "'")


def counter_refused(effect: Effect) -> DataDependentError:
    """The error for an effect that invalidates the program it was traced with, again and again."""
    values = (*effect.before.values(), *effect.after.values())
    in_a_tensor = any(isinstance(v, int | float | torch.Tensor) for v in values)
    return DataDependentError(
        f"the step reads and changes {effect.text()} in every call: its Python runs only when it "
        "is traced, so every call would be traced again. Do this outside of the compiled step"
        + (", keep the value in a tensor that the step writes in place" if in_a_tensor else "")
        + ', or compile the step with watch="replay", which runs its Python in every call'
    )
