"""Says when all ranks have asked for a collective, and finds disagreements and deadlocks.

It is the one place where the ranks' requests come together, and gives them an order that holds for
all ranks. It knows no tensors and no threads; whoever uses it holds a lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from xla_dtensor.horovod.collectives.collective import Request
from xla_dtensor.horovod.collectives.kinds import Join
from xla_dtensor.horovod.collectives.requests import Response
from xla_dtensor.horovod.ranks.disagreements import disagreement, listed


class Coordinator:
    """The requests of all ranks that haven't been answered yet.

    Args:
        size: how many ranks there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._waiting: dict[str, dict[int, Request]] = {}  # in the order in which they began
        self._joined: dict[int, Request] = {}
        self._last = -1
        self._ended: dict[int, str] = {}
        self._blocked: dict[int, str] = {}

    def submit(self, rank: int, request: Request) -> list[Response]:
        """A rank's part of a collective; what becomes possible with it.

        Args:
            rank: whose part it is.
            request: the part.
        """
        self._blocked.pop(rank, None)
        if isinstance(request.collective, Join):
            return self._join(rank, request)
        parts = self._waiting.setdefault(request.key, {})
        parts[rank] = request
        return self._look([request.key])

    def end(self, rank: int, why: str) -> list[Response]:
        """A rank takes part in nothing any more; what waits for it fails.

        Args:
            rank: which one.
            why: for the others' error.
        """
        self._ended[rank] = why
        self._blocked.pop(rank, None)
        return [*self._look(list(self._waiting)), *self._all_joined(self._last)]

    def block(self, rank: int, key: str) -> list[Response]:
        """A rank waits for a collective. If then all of them wait, for different ones, these fail.

        Args:
            rank: which one.
            key: that of the collective.
        """
        if key in self._waiting or rank in self._joined:  # else the answer is on its way
            self._blocked[rank] = key
        return self._deadlock()

    def unblock(self, rank: int) -> None:
        """A rank waits no longer.

        Args:
            rank: which one.
        """
        self._blocked.pop(rank, None)

    # --- what has become possible --------------------------------------------------------------

    def _join(self, rank: int, request: Request) -> list[Response]:
        self._joined[rank], self._last = request, rank
        return [*self._look(list(self._waiting)), *self._all_joined(rank)]

    def _all_joined(self, last: int) -> list[Response]:
        if not self._joined or len(self._joined) + len(self._ended) < self.size:
            return []
        joined, self._joined = dict(sorted(self._joined.items())), {}
        for rank in joined:
            self._blocked.pop(rank, None)
        everyone = tuple(range(self.size))
        request = joined[last]
        error = self._missing(request, everyone, joined)
        return [Response(request.key, everyone, joined, error, last)]

    def _look(self, keys: Iterable[str]) -> list[Response]:
        return [found for key in keys if (found := self._answer(key)) is not None]

    def _answer(self, key: str) -> Response | None:
        parts = self._waiting[key]
        request = next(iter(parts.values()))
        ranks = sorted(set(request.ranks).union(*(each.ranks for each in parts.values())))
        absent = [rank for rank in ranks if rank not in parts]
        # A rank that has joined takes part in what all do, with nothing.
        open_ = [r for r in absent if r not in self._ended and r not in self._joined]
        if open_:
            return None
        error = self._missing(request, ranks, parts) or disagreement(parts)
        joined = [rank for rank in absent if rank in self._joined]
        if not error and joined:
            error = _beyond_join(request, joined)
        return self._respond(key, ranks, error)

    def _missing(self, request: Request, ranks: Iterable[int], parts: dict[int, Request]) -> str:
        gone = [f"rank {r} {self._ended[r]}" for r in ranks if r in self._ended and r not in parts]
        if not gone:
            return ""
        return f"{described(request)}: {listed(parts)} waited, but {'; '.join(gone)}"

    def _respond(self, key: str, ranks: Iterable[int], error: str) -> Response:
        parts = self._waiting.pop(key)
        for rank, blocked in list(self._blocked.items()):
            if blocked == key:
                self._blocked.pop(rank)
        return Response(key, tuple(ranks), dict(sorted(parts.items())), error)

    def _deadlock(self) -> list[Response]:
        alive = set(range(self.size)) - set(self._ended)
        idle = set(self._blocked) | set(self._joined)
        if alive - idle or not self._waiting:
            return []
        told = []
        for key, parts in self._waiting.items():
            request = next(iter(parts.values()))
            waiting = [r for r in parts if self._blocked.get(r) == key]
            lacking = [r for r in request.ranks if r not in parts]
            how = f"{listed(waiting)} waiting" if waiting else f"asked for by {listed(parts)}"
            told.append(f"{described(request)} ({how}, without {listed(lacking)})")
        error = (
            "a deadlock, no rank can go on: " + "; ".join(told) + ". All ranks of a process set "
            "have to call the same collectives, under the same names"
        )
        keys = list(self._waiting)
        ranks = {key: next(iter(self._waiting[key].values())).ranks for key in keys}
        return [self._respond(key, ranks[key], error) for key in keys]


def described(request: Request) -> str:
    """A collective as an error calls it.

    Args:
        request: a rank's part of it.
    """
    where = "" if request.set_id == 0 else f" in process set {request.set_id}"
    return f"{request.title}{where}"


def _beyond_join(request: Request, joined: list[int]) -> str:
    if request.collective.outlives_joins:
        return ""
    return (
        f"{described(request)}: {listed(joined)} joined, and what is gone adds zeros to sums and "
        f"averages alone; {request.collective.title} is not supported after a join"
    )
