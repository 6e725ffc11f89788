"""Which number outside of a step caused a new trace (the next one takes it as an input).

And which line of the step's Python has compared it.
"""

from __future__ import annotations

import re
from collections import Counter

from xla_dtensor.compilation.objects.found import Found, FoundValue
from xla_dtensor.compilation.trace.numbers import Decision

# After so many traces in a row, or because of one line, the log has a message.
MANY_TRACES = 5


class ManyTraces:
    """How often a step is traced again, and by whose decision: what to say of it, and when."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._by_line: Counter[str] = Counter()

    def message(self, why: str | None, decided: Decision | None) -> str | None:
        """What to say after one more trace, if anything.

        Args:
            why: why the step was traced.
            decided: the decision that no longer held, if that was it.
        """
        self.in_a_row += 1
        line = "" if decided is None else decided.where()
        self._by_line[line] += 1
        if self.in_a_row == MANY_TRACES:
            self._by_line[line] = MANY_TRACES  # no second message for this line
            often = f"in {MANY_TRACES} calls in a row"
        elif line and self._by_line[line] == MANY_TRACES:
            often = f"{MANY_TRACES} times because of one line"
        else:
            return None
        why = why or "every call has had other arguments"
        return f"has been traced {often}, which takes long: {why}{_way_out(decided)}"


def _way_out(decided: Decision | None) -> str:
    if decided is None:
        return ""
    if type(decided.outcome) is bool:
        return (
            ". Each outcome has a program: decide before the call, or on the devices (torch.where)"
        )
    return (
        ". Python needs the number itself there, so each value has a program: where it is a bound "
        "(range, a size, a slice), use one that stays and mask the rest (buckets= pads arguments); "
        "where it is a value (int(n), float(n)), compute with n as it is, or give a tensor"
    )


def changed_numbers(differences: list[tuple[Found | None, Found | None]]) -> frozenset[str]:
    """What messages call the numbers among what has changed. Like a number among the arguments,
    one that isn't what it was is from then on taken from its place in each call."""
    found = set()
    for before, after in differences:
        if not (isinstance(before, FoundValue) and isinstance(after, FoundValue)):
            continue
        if type(before.value) in (int, float) and type(after.value) in (int, float):
            # Without the number that `Reached.note` adds to a name used twice: both become inputs.
            found.add(re.sub(r" \(\d+\)$", "", before.path))
    return frozenset(found)
