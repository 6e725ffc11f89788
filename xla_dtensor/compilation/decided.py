"""Which number outside of a step has changed, so that the next trace takes it as an input; and
which line of the step's Python decided by one."""

from __future__ import annotations

import re

from xla_dtensor.compilation.found import Found


def changed_numbers(differences: list[tuple[Found | None, Found | None]]) -> frozenset[str]:
    """What messages call the numbers among what has changed. Like a number among the arguments,
    one that isn't what it was is from then on taken from its place in each call."""
    found = set()
    for before, after in differences:
        if before is None or after is None or before.kind != "value" or after.kind != "value":
            continue
        if type(before.value) in (int, float) and type(after.value) in (int, float):
            # Of two places of one name both are taken.
            found.add(re.sub(r" \(\d+\)$", "", before.path))
    return frozenset(found)
