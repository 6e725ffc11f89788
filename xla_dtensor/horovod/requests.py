"""Requests and responses: what a rank tells the coordinator, and what all ranks then launch.

They are plain data, which goes between threads as it is and between processes as JSON.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """One rank's part of a collective.

    Attributes:
        kind: allreduce, allgather, broadcast, alltoall, reducescatter, barrier, join, process_set.
        name: under which the ranks' parts find each other.
        ranks: the ranks that take part, of the process set.
        set_id: the process set's number.
        shapes, dtypes: of the rank's tensors; several in a grouped collective.
        op: the name of the reduction.
        prescale, postscale: its factors.
        root: the rank that a broadcast comes from.
        splits: of an alltoall, how many rows go to each rank.
        detail: what else has to be the same on all ranks.
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    set_id: int = 0
    shapes: tuple[Shape, ...] = ()
    dtypes: tuple[str, ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    detail: str = ""

    @property
    def key(self) -> str:
        """What the ranks' parts have in common."""
        return f"{self.set_id}:{self.name}"

    @property
    def title(self) -> str:
        """As errors call it."""
        return f"{self.kind} {self.name.removeprefix(f'{self.kind}.')!r}"

    def text(self) -> str:
        """As it goes between processes."""
        return json.dumps(dataclasses.astuple(self))

    @staticmethod
    def of_text(text: str) -> Request:
        """The request that `text` made the text of."""
        return Request(*map(_frozen, json.loads(text)))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Response:
    """What the ranks of a collective are to do, each at the same place among others.

    Attributes:
        key: that of their requests.
        ranks: those that take part.
        requests: the parts of those that have given one; who is missing has joined.
        error: why it can't be; "" where it can.
        last: of a join, the rank that came last.
    """

    key: str
    ranks: tuple[int, ...]
    requests: dict[int, Request]
    error: str = ""
    last: int = -1

    def text(self) -> str:
        """As it goes between processes."""
        requests = {rank: request.text() for rank, request in self.requests.items()}
        return json.dumps([self.key, self.ranks, requests, self.error, self.last])

    @staticmethod
    def of_text(text: str) -> Response:
        """The response that `text` made the text of."""
        key, ranks, requests, error, last = json.loads(text)
        parts = {int(rank): Request.of_text(request) for rank, request in requests.items()}
        return Response(key, tuple(ranks), parts, error, last)


def failed(response: Response, error: Exception) -> Response:
    """A response that couldn't be carried out.

    Args:
        response: the response.
        error: what was raised.
    """
    title = next(iter(response.requests.values())).title
    return dataclasses.replace(response, error=f"{title}: {type(error).__name__}: {error}")
