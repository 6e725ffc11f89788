"""Text of symbolic numbers that is only printed or logged, put together when the number is known.

While a step is traced such text has a mark in place of each number. `print` and loggers read the
marks: a number that is known shows its value of now; where one isn't known before the program has
run (``print(f"loss {loss.item():.3f}")``), each call prints, when it has run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

from xla_dtensor.base.numbers.pending_number import PendingNode
from xla_dtensor.base.numbers.traced_number import NumberNode

# Rare brackets around a letter (a Yi syllable) that says which it is: `repr` leaves them as they
# are, and there are no capitals of them.
_BEGIN, _END, _LETTERS = "\u2e28", "\u2e29", range(0xA016, 0xA48D)
_MARK = re.compile(f"{_BEGIN}([{chr(_LETTERS[0])}-{chr(_LETTERS[-1])}]+){_END}")


class NumberInText(NamedTuple):
    """What a text shows of a number.

    Attributes:
        node: of the number.
        text: makes its text of its value; None: the value itself is shown.
    """

    node: NumberNode
    text: Callable[[Any], str] | None


class Parts(tuple[str | NumberInText, ...]):
    """A text in parts; or a number that is printed itself."""

    __slots__ = ()


class Marks:
    """The marks in the texts of one trace.

    Attributes:
        without: the code of functions that have made text of a number without one: ``"%d" % n``
            asks for an int.
    """

    def __init__(self) -> None:
        self._pieces: list[NumberInText] = []
        self.without: set[CodeType] = set()

    def mark(self, node: NumberNode, text: Callable[[Any], str]) -> str:
        """What stands for the text of a number."""
        self._pieces.append(NumberInText(node, text))
        high, low = divmod(len(self._pieces) - 1, len(_LETTERS))
        return f"{_BEGIN}{chr(_LETTERS[low]) * (high + 1)}{_END}"

    def parts(self, text: str) -> Parts | None:
        """The parts of a text that has marks; None if it has none."""
        if _BEGIN not in text:
            return None
        between = _MARK.split(text)
        found: list[str | NumberInText] = [between[0]]
        for letters, other in zip(between[1::2], between[2::2], strict=True):
            number = (len(letters) - 1) * len(_LETTERS) + _LETTERS.index(ord(letters[0]))
            known = number < len(self._pieces)
            found.append(self._pieces[number] if known else f"{_BEGIN}{letters}{_END}")
            found.append(other)
        return Parts(found)


def shown_now(parts: Parts) -> Any:
    """The text with the numbers' present values, or the value of a number that is no text yet."""
    if len(parts) == 1 and isinstance(parts[0], NumberInText):
        return parts[0].node.value
    return "".join(
        part if isinstance(part, str) else (part.text or str)(part.node.value) for part in parts
    )


def waiting(parts: Parts) -> PendingNode | None:
    """A number that isn't known yet, if there is one."""
    nodes = (part.node for part in parts if isinstance(part, NumberInText))
    return next((node for node in nodes if isinstance(node, PendingNode)), None)
