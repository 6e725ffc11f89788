"""State that a step keeps outside of itself and replaces in each call: ``self.h = f(self.h)``.

What is in such a place is another tensor, or another number, in every call. So each call takes it
from there as it takes its arguments: its form is in the key of programs, and its value is an input.
A step learns which places these are when it is traced (`Traced.replaced`, `Traced.counted`).
"""

from __future__ import annotations

import types
from typing import Any

import torch

from xla_dtensor.base.numbers.row_counts import is_count
from xla_dtensor.compilation.objects.flatten import is_record
from xla_dtensor.compilation.objects.kinds import fields_of
from xla_dtensor.compilation.objects.kinds_of_counts import COUNT
from xla_dtensor.compilation.objects.places import MISSING, Place
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor
from xla_dtensor.tensors.subclasses import is_shown

_TENSORS = (XLATensor, XLAShardedTensor, torch.Tensor)
_PLAIN = frozenset({bool, str, int, float, types.NoneType, type(MISSING)})


class Carried:
    """One place whose content each call takes like an argument.

    Attributes:
        place, key: where.
    """

    __slots__ = ("key", "place")

    def __init__(self, place: Place, key: Any) -> None:
        self.place, self.key = place, key

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.place.label(self.key)

    def read(self) -> Any:
        """What is there now."""
        return self.place.at(self.key)

    def where(self) -> tuple[int, Any]:
        """What is equal for the same place alone."""
        return self.place.container, self.key


def is_state(value: Any, symbolic: bool = False) -> bool:
    """Whether ``value`` can be taken like an argument: tensors (on the CPU those without a
    history), numbers, strings and ``None``, in tuples, lists, dicts and dataclasses.

    Args:
        symbolic: whether numbers may be those of a trace.
    """
    cls = type(value)
    if cls in _TENSORS or (isinstance(value, torch.Tensor) and is_shown(value)):
        return cls is not torch.Tensor or not has_history(value)
    if is_count(value):
        return True
    if cls in _PLAIN or (symbolic and issubclass(cls, torch.SymInt | torch.SymFloat)):
        return True
    inner: Any
    if cls is dict:
        inner = value.values() if all(type(key) is str for key in value) else (object,)
    elif cls in (list, tuple) or (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        inner = value
    elif is_record(value):
        inner = fields_of(value).values()
    else:
        return False
    return all(is_state(part, symbolic) for part in inner)


def has_history(value: torch.Tensor) -> bool:
    """Whether a tensor has been computed from one that requires grad."""
    return value.requires_grad and not value.is_leaf


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a state."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for _, inner in parts_of(value) for tensor in tensors_in(inner)]


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """What a state consists of: (name in messages, part)."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", inner) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{i}]", inner) for i, inner in enumerate(value)]
    if is_count(value):
        return [("", counts.tensor) for counts in COUNT.split(value)[1]]
    if is_record(value):
        return [(f".{name}", inner) for name, inner in fields_of(value).items()]
    return []


def each_once(carried: list[Carried]) -> list[Carried]:
    """Without those that are another one's place."""
    return list({one.where(): one for one in carried}.values())
