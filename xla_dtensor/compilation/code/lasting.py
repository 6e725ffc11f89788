"""What a trace has done that can't be taken back if it fails: the step's Python mustn't run again.

One trace runs at a time, so these are the process's.
"""

from __future__ import annotations

_noted: list[str] = []


def note(what: str) -> None:
    """The step's Python has done something for good, in words that follow "the step"."""
    _noted[:] = [what]
    Since.count += 1


class Since:
    """What has been noted since this was made.

    Attributes:
        count: how often something was, in all.
    """

    count = 0

    def __init__(self) -> None:
        self._begin = Since.count

    def what(self) -> str | None:
        """What happened last; None if nothing did."""
        return _noted[-1] if Since.count != self._begin else None
