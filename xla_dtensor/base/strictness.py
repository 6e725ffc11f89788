"""How strictly a pin fixes a sharding: not at all, only the axes it has, or exactly."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Strictness(enum.Enum):
    """How firmly a sharding is asked for: not at all, so that dims keep the axes that they have and
    may get others (`plans/pin.py`), or exactly."""

    FREE = enum.auto()
    HELD = enum.auto()
    EXACT = enum.auto()


@dataclass(frozen=True)
class Ask:
    """How a sharding is asked for: by itself, and in a program that takes no axes apart."""

    strictness: Strictness
    loose: Strictness


ALWAYS = Ask(Strictness.EXACT, Strictness.EXACT)
PIN = Ask(Strictness.EXACT, Strictness.FREE)
PIN_BATCHES = Ask(Strictness.EXACT, Strictness.HELD)
HOLD = Ask(Strictness.HELD, Strictness.HELD)
OFFER = Ask(Strictness.FREE, Strictness.FREE)
"""Asked for only where XLA doesn't compile the program otherwise."""


@dataclass(frozen=True)
class Pinned:
    """The layouts of an operation's rule are asked of XLA.

    Attributes:
        results, leaves: how.
        out: how whole tensors are asked for by an ``out=`` overload, of which rules know nothing;
            None if they aren't.
        in_place: how what an operation writes is asked for, whole, if nothing else of it is; None
            if it is like any other operation of its kind.
        dims: only the first ones keep their axes; None of all.
        moving: only operations that have to move a tensor.
    """

    results: Ask
    leaves: Ask
    out: Ask | None = None
    in_place: Ask | None = None
    dims: int | None = None
    moving: bool = False
