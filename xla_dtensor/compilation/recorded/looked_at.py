"""What a step's Python has looked at on the host, which is compared before each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xla_dtensor.compilation.call.arguments import Arguments


@dataclass(frozen=True)
class Looked:
    """Something that the step's Python has looked at, which is part of the program.

    Attributes:
        read: what it is in a call, from the arguments and the host's results.
        was: what it was in the trace.
        text: what has been looked at.
        where: gives the user's line.
        is_item: whether it is an int that could be an input, which goes by the user's line.
    """

    read: Callable[[Arguments, list[Any]], Any]
    was: Any
    text: str
    where: Callable[[], str]
    is_item: bool = False

    def difference(self) -> str:
        where = self.where()
        return f"{self.text}{where and f' ({where})'}, which is part of the program"
