"""The programs of a step for one kind of arguments, the latest first, and when they are freed."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Iterator

from xla_dtensor.compilation.program.program import Program

logger = logging.getLogger("xla_dtensor")

# Programs kept per kind of arguments whatever their size, and the bytes that more of them may
# take; the least recently used one goes first.
KEPT = 16
KEPT_BYTES = 512 * 2**20


class Programs:
    """Programs, the one used last first.

    A program refers to what it watches: models, optimizers, their tensors. Weak references won't do
    (tensors that have one can't be swapped, `torch.utils.swap_tensors`), and strong ones would keep
    a model alive that its user has replaced by another. So a program that has been succeeded by one
    with other tensors is held by memory that only the first one uses, its *anchor*
    (``Storage.holds``), and by nobody else: when its user lets go of that, both are garbage. While
    the user has the tensors, the program is there, too, and may run again.
    """

    def __init__(self) -> None:
        self._held: list[weakref.ref[Program]] = []
        # Programs that no storage keeps alive (`Program` without an anchor).
        self._own: dict[int, Program] = {}
        self._told = False

    def __iter__(self) -> Iterator[Program]:
        return filter(None, map(operator.call, self._held))

    def first(self, program: Program) -> None:
        """``program`` has run; it may be a new one."""
        others = [p for p in self if p is not program]
        kept = [p for p in others if p.guards.stale is None]
        taken = program.bytes
        for position, other in enumerate(kept, 1):
            taken += other.bytes
            if position >= KEPT and taken > KEPT_BYTES:
                self._tell(position, taken)
                del kept[position - 1 :]
                break
        for other in others:
            if other not in kept:
                self._drop(other)
        self._held = [weakref.ref(p) for p in (program, *kept)]
        self._own[id(program)] = program
        self.succeeded(program)

    def _tell(self, count: int, taken: int) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "xla_dtensor: a compiled step has more than %d programs for arguments of one kind, "
                "which take %d MiB: from now on the one not used longest goes, and is made anew "
                "when it is wanted; step.recompilations says what tells them apart",
                count,
                taken // 2**20,
            )

    def succeeded(self, program: Program) -> None:
        """The step has come to ``program``: hold no other one that has memory of its own."""
        for other in list(self._own.values()):
            if other is not program and other.anchored(program):
                del self._own[id(other)]

    def clear(self) -> None:
        """Let go of all."""
        for program in self:
            self._drop(program)
        self._held = []

    def _drop(self, program: Program) -> None:
        program.release()
        self._own.pop(id(program), None)

    def __del__(self) -> None:
        self.clear()
