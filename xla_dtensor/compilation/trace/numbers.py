"""Numbers that are inputs of a program, and comparisons of them that the program depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xla_dtensor.base.numbers.traced_number import fits


@dataclass(frozen=True)
class Number:
    """A number that is an input of the program. One of ``read``, ``compute`` and ``item`` says how
    a call comes to it.

    Attributes:
        read: its present value, from a call's arguments.
        name: its name in messages, ``"AdamW.param_groups[0]['lr']"``.
        integer: whether it is an int.
        array: the constant that stands for it in the traced jaxpr.
        compute: of a number that Python has computed from those before it: from their values.
        kind: its type.
        item: of the item of a CPU tensor that the step computes: the host's operation, and which
            of its results.
    """

    read: Callable[[Any], float] | None
    name: str
    integer: bool
    array: Any
    compute: Callable[[list[float]], float] | None = None
    kind: type = float
    item: tuple[int, int] | None = None

    def computed(self, before: list[float]) -> float:
        """The present value of one that is computed.

        Args:
            before: the values of the numbers before it.

        Raises:
            NumberChanged: it can't be computed any more, or is another kind of number.
        """
        assert self.compute is not None
        try:
            value = self.compute(before)
        except ARITHMETIC as error:
            raise NumberChanged(f"{self.name}: {error}") from None
        if type(value) is not self.kind:
            raise NumberChanged(f"{self.name}: now {value!r}")
        return value


class NumberChanged(Exception):
    """A number is no longer of the kind that the program was made for."""


# What Python's arithmetic may raise when later calls repeat it with other numbers.
ARITHMETIC = (ArithmeticError, ValueError, TypeError)


def values_of(
    numbers: list[Number],
    arguments: Any,
    results_of: Callable[[int, list[float]], list[Any]] | None = None,
) -> list[float]:
    """The present values of a trace's numbers.

    Args:
        results_of: gives the results of one of the host's operations, which may compute with the
            numbers before it; None if the host has none.

    Raises:
        NumberChanged: one has none of the kind that it had.
    """
    found: list[float] = []
    for number in numbers:
        if number.read is not None:
            value = number.read(arguments)
        elif number.item is not None:
            assert results_of is not None
            operation, index = number.item
            value = results_of(operation, found)[index].item()
        else:
            value = number.computed(found)
        if number.integer and not fits(value):
            raise NumberChanged(f"{number.name}: now {value!r}")
        found.append(value)
    return found


@dataclass(frozen=True)
class Decision:
    """Something that the step's Python decided by a number; it holds only while the outcome is the
    same."""

    compute: Callable[[list[float]], Any]
    outcome: Any
    text: str
    where: Callable[[], str] = str

    def difference(self) -> str:
        """That it doesn't hold any more, and which of the user's lines has decided."""
        where = self.where()
        return f"the step decided {self.text}{where and f' ({where})'}, which holds no longer"
