"""Counters that are raised when a tensor's flags, hooks or form change, and not only its values.

A compiled step depends on the flags, hooks and memory of hundreds of tensors. Comparing them all
before every call would cost more than the call, so what changes them counts here, and a step looks
at its tensors again only when the count has moved.
"""

from __future__ import annotations


class Epoch:
    """A count.

    Attributes:
        value: how many changes there have been.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def moved(self) -> None:
        """Something has changed."""
        self.value += 1


tensors = Epoch()
"""Counts: ``requires_grad`` set, memory replaced (``.data =``, ``set_``), a hook of any kind
registered or removed."""

forms = Epoch()
"""Counts: a storage has got another form (layout, shape, dtype, devices)."""
