"""`hvd.rank()` where one process drives all devices: another number on each of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.errors import PerDeviceValueError


class RankNumber:
    """A number that is another one on each device, made by `hvd.rank()`.

    It computes with numbers, tensors and torch's functions, on the devices; as a number of
    Python's, in ``if``, ``range``, an index or a format, it raises.

    Args:
        tensor: the per-device tensor that it is, of no dims.
        text: how it came about, for messages.
    """

    def __init__(self, tensor: torch.Tensor, text: str) -> None:
        self.tensor = tensor
        self._text = text

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = pytree.tree_map_only(cls, lambda number: number.tensor, (args, kwargs))
        return function(*plain[0], **(plain[1] or {}))

    def _refuse(self) -> NoReturn:
        raise PerDeviceValueError(
            f"{self._text} is another number on each device, and one process drives them all: it "
            "computes with tensors, but can't decide an if, count a range or be an index. "
            "hvd.is_coordinator() says who prints and saves; hvd.per_rank(fn) makes a value for "
            "each rank, as fn(rank) of its number does; in hvd.run(fn, np=...) and in several "
            "processes ranks are numbers of Python's"
        )

    def __repr__(self) -> str:
        return f"<{self._text}: another number on each device>"

    def __neg__(self) -> RankNumber:
        return RankNumber(-self.tensor, f"-{self._text}")

    def __invert__(self) -> RankNumber:
        return RankNumber(~self.tensor, f"~{self._text}")


for _name in ("bool", "index", "int", "float", "iter", "hash"):
    setattr(RankNumber, f"__{_name}__", RankNumber._refuse)

_SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "and": "&", "or": "|", "xor": "^",
}  # fmt: skip


def _binary(name: str, reverse: bool) -> Callable[[RankNumber, Any], Any]:
    function = getattr(operator, f"{name}_" if name in ("and", "or") else name)

    def method(self: RankNumber, other: Any) -> Any:
        value = other.tensor if isinstance(other, RankNumber) else other
        if not isinstance(value, torch.Tensor | int | float | bool):
            return NotImplemented
        result = function(value, self.tensor) if reverse else function(self.tensor, value)
        if isinstance(other, torch.Tensor):
            return result
        told = other._text if isinstance(other, RankNumber) else repr(other)
        sides = (told, self._text) if reverse else (self._text, told)
        return RankNumber(result, f"({sides[0]} {_SYMBOLS[name]} {sides[1]})")

    return method


for _name in _SYMBOLS:
    setattr(RankNumber, f"__{_name}__", _binary(_name, reverse=False))
    if _name not in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(RankNumber, f"__r{_name}__", _binary(_name, reverse=True))


class PerRank(list):
    """One value for each rank, in a process that drives all of them, where they can't be one
    per-device tensor: tensors of several shapes, or other objects. Made by `hvd.per_rank`; the
    collectives take it, and return it where the results differ in shape."""

    def __repr__(self) -> str:
        return f"PerRank({super().__repr__()})"
