"""`World`, the interface of the three kinds of ranks, and `HorovodRequest`, what it is given.

The ranks are the devices of one process (`ranks.devices`), processes (`ranks.several`) or threads
(`ranks.threads`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_dtensor.horovod.process_sets import ProcessSet, ProcessSets, global_process_set
from xla_dtensor.horovod.reductions import ReduceOp


@dataclass
class HorovodRequest:
    """A collective as its caller asks for it, with tensors; `requests.Request` is what of it the
    other ranks have to know.

    Attributes:
        kind: allreduce, allgather, broadcast, alltoall or reducescatter.
        tensors: one, or those of a grouped collective.
        name: the user's; None to number it.
        process_set: the ranks that take part.
        op, prescale, postscale: of those that reduce.
        compression: what the tensors travel as, of `Compression`; None for what they are.
        root: the rank that a broadcast comes from.
        splits: of an alltoall, how many rows go to each rank; None for equal parts.
        targets: the tensors that the results are written to; None for new ones.
    """

    kind: str
    tensors: Sequence[Any]
    name: str | None = None
    process_set: ProcessSet = field(default_factory=lambda: global_process_set)
    op: ReduceOp = ReduceOp.Sum
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Any = None
    root: int = -1
    splits: Any = None
    targets: Sequence[Any] | None = None


class Handle:
    """What an asynchronous operation returns: `hvd.synchronize(handle)` waits for it, and
    `hvd.poll(handle)` asks.

    Args:
        name: of the operation.

    Attributes:
        unpack: what `hvd.synchronize` returns of the list of results.
        rows: of an allgather whose ranks have rows of their own, how many, by tensor and rank.
        received: of an alltoall, how many rows have come from each rank.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.results: Any = None
        self.finished = False
        self.unpack: Callable[[list[Any]], Any] = list
        self.rows: list[list[int]] | None = None
        self.received: list[int] = []

    def __repr__(self) -> str:
        return f"<horovod handle of {self.name!r}>"


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
    def is_root(self, rank: int) -> bool:
        """Whether the caller is this rank, or drives it."""

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
