"""Whether a step calls ``id`` on its arguments, which gives another number in each call."""

from __future__ import annotations

import builtins
import sys
from typing import Any

from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.code.names import is_library


class AskedIds:
    """A block in which the step's code may call ``id``, which is another number for each object: a
    program that has asked for one is that object's.

    Args:
        watched: whether the step's code names ``id``; nothing is done otherwise.

    Attributes:
        found: which of `Arguments.objects` it has asked for.
    """

    def __init__(self, arguments: Arguments, watched: bool) -> None:
        self._where = {id(x): i for i, x in enumerate(arguments.objects())} if watched else {}
        self.found: set[int] = set()

    def __enter__(self) -> None:
        self._before = builtins.id
        if self._where:
            builtins.id = self._asked

    def __exit__(self, *exc_info: object) -> None:
        builtins.id = self._before

    def _asked(self, value: Any, /) -> int:
        number = self._before(value)
        position = self._where.get(number)
        if position is not None and not is_library(sys._getframe(1).f_globals.get("__name__")):
            self.found.add(position)
        return number
