"""`HorovodRequest` and `Handle` of a collective's caller, and `Response`, which all ranks get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xla_dtensor.horovod.collectives.collective import HorovodCollective, Request


@dataclass
class HorovodRequest:
    """A collective as its caller asks for it, with tensors; `Request` is what of it the other ranks
    have to know.

    Attributes:
        collective: what is to be done.
        tensors: one, or those of a grouped collective.
        name: the user's; None to number it.
        process_set: the ranks that take part; several sets where one process drives all ranks.
        compression: what the tensors travel as, of `Compression`; None for what they are.
        targets: the tensors that the results are written to; None for new ones.
    """

    collective: HorovodCollective
    tensors: Sequence[Any]
    name: str | None
    process_set: Any
    compression: Any = None
    targets: Sequence[Any] | None = None

    @property
    def kind(self) -> str:
        """The collective's, for names and errors."""
        return self.collective.kind


class Handle:
    """What an asynchronous operation returns: `hvd.synchronize(handle)` waits for it, and
    `hvd.poll(handle)` asks.

    Args:
        name: of the operation.

    Attributes:
        unpack: what `hvd.synchronize` returns of the list of results.
        requests, position: for the gradient, as of `Done`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.results: Any = None
        self.finished = False
        self.unpack: Callable[[list[Any]], Any] = list
        self.requests: Sequence[Request] = ()
        self.position: int | None = None

    def __repr__(self) -> str:
        return f"<horovod handle of {self.name!r}>"


@dataclass(frozen=True)
class Response:
    """What the ranks of a collective are to do, each at the same place among others.

    Attributes:
        key: that of their requests.
        ranks: those that take part.
        requests: the parts of those that have given one, in order; who is missing has joined.
        error: why it can't be; "" where it can.
        last: of a join, the rank that came last.
    """

    key: str
    ranks: tuple[int, ...]
    requests: dict[int, Request]
    error: str = ""
    last: int = -1

    @property
    def one(self) -> Request:
        """Some rank's part, for what all have in common."""
        return next(iter(self.requests.values()))

    @property
    def is_launched(self) -> bool:
        """Whether devices have something to do."""
        return not self.error and any(request.shapes for request in self.requests.values())


def failed(response: Response, error: Exception) -> Response:
    """A response that couldn't be carried out.

    Args:
        response: the response.
        error: what was raised.
    """
    text = f"{response.one.title}: {type(error).__name__}: {error}"
    return dataclasses.replace(response, error=text)
