"""Horovod's process sets: subsets of the ranks that have collectives of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from xla_dtensor.horovod.world.current_world import current


class ProcessSet:
    """Some of the ranks; collectives take it as ``process_set=``.

    It is registered by ``hvd.init(process_sets=[...])`` or `add_process_set`, on all ranks.

    Args:
        ranks: its members, each once.

    Raises:
        ValueError: a rank twice, or a negative one.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        even = hvd.add_process_set(range(0, hvd.size(), 2))
        assert even.ranks[:2] == [0, 2] and even.size() == hvd.size() // 2
        total = hvd.allreduce(torch.ones(3, device="xla"), op=hvd.Sum, process_set=even)
        assert total.local_values()[0].tolist() == [even.size()] * 3
        assert hvd.remove_process_set(even) and even.process_set_id is None
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.process_set_id: int | None = None
        self._ranks = sorted(map(int, ranks))
        if len(set(self._ranks)) != len(self._ranks) or min(self._ranks, default=0) < 0:
            raise ValueError(f"ProcessSet({self._ranks}): give each rank once, from 0")

    @property
    def ranks(self) -> list[int]:
        """The members, in order."""
        return list(self._ranks)

    def included(self) -> Any:
        """Whether the caller is a member; True where one process drives all ranks."""
        return current().position_in(self.ranks) is not None

    def rank(self) -> Any:
        """The caller's number in the set; where one process drives all ranks, a per-device number
        (-1 on devices that aren't members).

        Raises:
            ValueError: the caller is no member, or the set isn't registered.
        """
        self._check()
        position = current().position_in(self.ranks)
        if position is None:
            raise ValueError(f"the caller is no member of {self!r}")
        return position

    def size(self) -> int:
        """The number of members.

        Raises:
            ValueError: the set isn't registered.
        """
        self._check()
        return len(self.ranks)

    def _check(self) -> None:
        if self.process_set_id is None:
            raise ValueError(
                f"{self!r} isn't registered: give it to hvd.init(process_sets=) or "
                "hvd.add_process_set"
            )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ProcessSet)
            and self.process_set_id == other.process_set_id
            and self.ranks == other.ranks
        )

    def __hash__(self) -> int:
        return hash(tuple(self._ranks))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _Global(ProcessSet):
    """All ranks, however many there are."""

    def __init__(self) -> None:
        super().__init__(())
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        return list(range(current().size))

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "ProcessSet(process_set_id=0, all ranks)"


global_process_set = _Global()


class ProcessSets:
    """The registered sets of one rank: the same, in the same order, on all."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._next = 1
        self._sets: dict[int, ProcessSet] = {}

    def add(self, given: ProcessSet | Sequence[int]) -> ProcessSet:
        """Register a set.

        Raises:
            ValueError: a member is no rank, or the set is registered already.
        """
        new = given if isinstance(given, ProcessSet) else ProcessSet(given)
        self.check(new)
        new.process_set_id = self._next
        self._sets[self._next] = new
        self._next += 1
        return new

    def check(self, new: ProcessSet) -> None:
        """Raise if a set can't be registered."""
        if not new.ranks or new.ranks[-1] >= self._size:
            raise ValueError(f"{new!r}: the ranks are 0 to {self._size - 1}, and one has to be in")
        if any(known.ranks == new.ranks for known in self.all()):
            raise ValueError(f"{new!r}: there is a process set of these ranks already")

    def remove(self, known: ProcessSet) -> None:
        """Forget a set."""
        self._sets.pop(known.process_set_id or 0)
        known.process_set_id = None

    def has(self, process_set: ProcessSet) -> bool:
        """Whether a set is registered."""
        return process_set.process_set_id in (0, *self._sets)

    def all(self) -> list[ProcessSet]:
        """All of them, with that of all ranks."""
        return [global_process_set, *self._sets.values()]

    def forget(self) -> None:
        """Forget all."""
        for known in list(self._sets.values()):
            self.remove(known)
