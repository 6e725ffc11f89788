"""One call of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xla_dtensor.compilation.call.arguments import Arguments


class Prepared:
    """What the checks of a call have computed, and its launch needs.

    Attributes:
        numbers: the values of the program's numbers.
        host: the results of the host's operations.
    """

    __slots__ = ("host", "numbers")

    def __init__(self, numbers: list[float], host: list[Any]) -> None:
        self.numbers, self.host = numbers, host


class Run:
    """One run of a program.

    Attributes:
        arguments, prepared: of the call.
        arrays: what the program has computed; None before it has.
        made: the tensors made of that, by what stands for them.
        objects: the objects made around them, by their numbers.
        error: what has failed first in writing back, or None.
    """

    __slots__ = ("arguments", "arrays", "error", "made", "objects", "prepared")

    def __init__(self, arguments: Arguments, prepared: Prepared) -> None:
        self.arguments, self.prepared = arguments, prepared
        self.arrays: Any = None
        self.made: dict[int, Any] = {}
        self.objects: dict[int, Any] = {}
        self.error: BaseException | None = None

    def succeeds(self, piece: Callable[[Run], Any]) -> bool:
        """Do a piece of the writing back; if it fails, that is raised when the rest is done."""
        try:
            piece(self)
        except BaseException as error:
            self.error = self.error or error
            return False
        return True

    def insist(self, piece: Callable[[Run], Any]) -> None:
        """Do a piece that may be done twice, again if it fails (for want of memory, say)."""
        if not self.succeeds(piece):
            self.succeeds(piece)
