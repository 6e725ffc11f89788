"""`World`, the interface of the three kinds of ranks: devices, processes and threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from xla_dtensor.horovod.collectives.requests import Handle, HorovodRequest
from xla_dtensor.horovod.world.process_sets import ProcessSet, ProcessSets


class World(ABC):
    """The ranks as one of them sees them.

    Attributes:
        size: how many there are.
        sets: the process sets.
        is_alone: whether one process drives them all, by one program.
    """

    size: int
    sets: ProcessSets
    is_alone = False
    local_size: int
    cross_size: int = 1
    cross_rank: Any = 0

    @property
    @abstractmethod
    def rank(self) -> Any:
        """The caller's number; in one process that drives all ranks, a number per device."""

    @property
    @abstractmethod
    def local_rank(self) -> Any:
        """The caller's number on its host."""

    @property
    @abstractmethod
    def is_coordinator(self) -> bool:
        """Whether the caller is rank 0, or stands for all ranks."""

    @property
    @abstractmethod
    def mesh(self) -> Any:
        """The ranks' devices."""

    @abstractmethod
    def on_devices(self, value: Any) -> Any:
        """What `per_rank` has returned, a tensor, on the rank's device."""

    @abstractmethod
    def start(self, call: HorovodRequest) -> Handle:
        """Begin a collective."""

    @abstractmethod
    def poll(self, handle: Handle) -> bool:
        """Whether waiting for it would not wait."""

    @abstractmethod
    def synchronize(self, handle: Handle) -> Any:
        """Its results, once they are there: a list of tensors."""

    @abstractmethod
    def barrier(self, process_set: ProcessSet) -> None:
        """Go on once all ranks of a set have come here."""

    @abstractmethod
    def join(self) -> int:
        """Take part in what the others do with zeros, until all have come here; the last rank."""

    @abstractmethod
    def agree_on_set(self, what: str, ranks: Sequence[int]) -> None:
        """Go on once all ranks make, or remove, the same process set."""

    @abstractmethod
    def objects(self, value: Any, process_set: ProcessSet, root: int | None) -> list[Any]:
        """The objects of a set's ranks, in their order; of ``root`` alone if it is given."""

    @abstractmethod
    def per_rank(self, function: Any) -> Any:
        """What ``function`` returns for the rank; for each rank, where one process has all."""

    @abstractmethod
    def position_in(self, ranks: Sequence[int]) -> Any:
        """The caller's position among some ranks; None if it is none of them."""

    def close(self) -> None:  # noqa: B027  (most have nothing to do)
        """Take part in nothing any more."""
