"""Text of symbolic numbers that is only printed or logged, put together when the number is known.

While a step is traced such text has a mark in place of each number. `print` and loggers read the
marks: a number that is known shows its value of now; where one isn't known before the program has
run (``print(f"loss {loss.item():.3f}")``), each call prints, when it has run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

from xla_dtensor.base.numbers.pending_number import PendingNode
from xla_dtensor.base.numbers.traced_number import NumberNode

# Two characters that no text has (Unicode's noncharacters), around one that counts.
BEGIN, _END, _FIRST = "\ufdd0", "\ufdd1", 0xF0000


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
        return f"{BEGIN}{chr(_FIRST + len(self._pieces) - 1)}{_END}"

    def parts(self, text: str) -> Parts:
        """The parts of a text that may have marks."""
        first, *others = text.split(BEGIN)
        found: list[str | NumberInText] = [first]
        for other in others:
            found += [self._pieces[ord(other[0]) - _FIRST], other[2:]]
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
