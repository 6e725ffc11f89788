"""Garbage collection around a trace: rarer, and of objects that the trace has made alone."""

from __future__ import annotations

import gc


class Seldom:
    """A block in which Python collects garbage by itself less often.

    A trace makes a hundred thousand objects, most of which stay. With Python's own setting the
    young ones are visited a hundred times meanwhile.
    """

    AFTER = 50_000
    """How many objects more than before there may be without a collection."""

    def __enter__(self) -> None:
        self._before = gc.get_threshold()
        if 0 < self._before[0] < self.AFTER:
            gc.set_threshold(self.AFTER, *self._before[1:])

    def __exit__(self, *exc_info: object) -> None:
        if gc.get_threshold() == (self.AFTER, *self._before[1:]):  # nobody else has set it
            gc.set_threshold(*self._before)


class NewObjects:
    """A block in which a full collection visits only objects that were made inside of it.

    A collection visits every object that the process has: seconds, in one with millions of them.
    Freezing takes those that are there out of sight at no cost. Of someone who has frozen objects
    (before a fork), and so inside of another such block, nothing is touched.
    """

    PYTHONS_OWN = 1000
    """More than Python freezes when it starts (375 objects in 3.12), less than there are then."""

    def __enter__(self) -> NewObjects:
        self._seldom = Seldom()
        self._seldom.__enter__()
        self._frozen = gc.get_freeze_count() < self.PYTHONS_OWN
        if self._frozen:
            gc.freeze()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._frozen:
            gc.unfreeze()
        self._seldom.__exit__()

    def made(self) -> set[int] | None:
        """The ids of all objects made inside of the block that may hold others; None if nobody
        knows."""
        return {id(thing) for thing in gc.get_objects()} if self._frozen else None
