"""Chooses what a backward pass finds saved, so that it holds no more bytes than a budget allows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from xla_dtensor.compilation.budget.cut import MinimumCut
from xla_dtensor.compilation.budget.forward import Forward
from xla_dtensor.compilation.budget.saving import Saving

PIECES = 15
"""How many sizes of pieces are tried, each by the root of 2 smaller than the one before: down to a
hundredth of everything."""

LEAST, MOST = 1e-3, 1e7
"""What a saved byte may be worth, in operations."""

STEPS = 14
"""How often the range of prices is halved."""


def choose(forward: Forward, budget: float) -> Saving:
    """What to save, so that the pass holds at most ``budget`` of the bytes that it would hold
    without, of values before it, at the least cost; the fewest bytes found, if that can't be."""
    everything = Saving(forward, forward.everything())
    limit = budget * everything.peak
    tried: set[frozenset[object]] = set()
    found: list[Saving] = []
    for k in range(PIECES):
        fixed = frozenset(forward.pieces(everything.peak / 2 ** (k / 2)))
        if fixed not in tried:
            tried.add(fixed)
            found += _savings(forward, fixed, limit)
    within = [saving for saving in found if saving.peak <= limit]
    if within:
        return min(within, key=lambda saving: saving.cost)
    return min([everything, *found], key=lambda saving: saving.peak)


def _savings(forward: Forward, fixed: frozenset[object], limit: float) -> Iterator[Saving]:
    """Plans for one way to cut the step: the one that holds least, and others up to the limit."""
    cut = MinimumCut(forward, fixed)
    saving = Saving(forward, cut.saved(MOST) | fixed)
    yield saving
    if saving.peak > limit:
        return
    low, high = LEAST, MOST
    for _ in range(STEPS):
        price = math.sqrt(low * high)
        saving = Saving(forward, cut.saved(price) | fixed)
        yield saving
        low, high = (low, price) if saving.peak <= limit else (price, high)
