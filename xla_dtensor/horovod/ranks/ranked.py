"""The base of ranks that have tensors of their own: processes, and threads of `hvd.run`.

It names the operations and makes results of outputs. How requests reach the other ranks is said by
its subclasses, in `threads` and `several`.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from xla_dtensor.errors import HorovodInternalError
from xla_dtensor.horovod.process_sets import ProcessSet, ProcessSets
from xla_dtensor.horovod.ranks.exchange import Output, received_splits
from xla_dtensor.horovod.ranks.ranked_tensors import request_of, to_array, to_tensor
from xla_dtensor.horovod.requests import Request, Response
from xla_dtensor.horovod.timeline import timeline
from xla_dtensor.horovod.world import Handle, HorovodRequest, World
from xla_dtensor.horovod.write_into import write


class RankedHandle(Handle):
    """A handle of what other ranks have to take part in.

    Args:
        request: the rank's part.
        call: what the user asked for; None for what has no tensors.

    Attributes:
        arrays: the tensors' values.
        response: what came of it; None before.
        outputs: the results.
    """

    def __init__(
        self, request: Request, call: HorovodRequest | None, arrays: Sequence[Any]
    ) -> None:
        super().__init__(request.name)
        self.request, self.call, self.arrays = request, call, arrays
        self.response: Response | None = None
        self.outputs: list[Output] = []


class Ranked(World):
    """A rank that has tensors of its own, and asks the others for each collective.

    Args:
        rank: its number.
        size: how many there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self.size = rank, size
        self.sets = ProcessSets(size)
        self._pending: dict[str, RankedHandle] = {}
        self._numbers: dict[tuple[int, str], int] = {}
        self._joins = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def is_coordinator(self) -> bool:
        return self._rank == 0

    def is_root(self, rank: int) -> bool:
        return rank == self._rank

    def position_in(self, ranks: Sequence[int]) -> int | None:
        return list(ranks).index(self._rank) if self._rank in ranks else None

    def per_rank(self, function: Callable[[int], Any]) -> Any:
        return function(self._rank)

    # --- how the ranks meet --------------------------------------------------------------------

    @abstractmethod
    def send(self, handle: RankedHandle) -> None:
        """Tell the others that this rank has come to a collective."""

    @abstractmethod
    def wait(self, handle: RankedHandle) -> None:
        """Go on when ``handle.response`` is there, and its outputs."""

    @abstractmethod
    def look(self, handle: RankedHandle) -> bool:
        """Whether `wait` wouldn't wait."""

    # --- collectives ---------------------------------------------------------------------------

    def start(self, call: HorovodRequest) -> Handle:
        members = self._members(call.process_set, call.kind)
        set_id = call.process_set.process_set_id or 0
        name = self._numbered(set_id, "noname") if call.name is None else call.name
        name = name if call.name is None else f"{call.kind}.{name}"
        request = request_of(call, name, call.tensors, members, call.splits)
        arrays = [to_array(tensor) for tensor in call.tensors]
        return self._begin(RankedHandle(request, call, arrays))

    def _members(self, process_set: ProcessSet, kind: str) -> list[int]:
        if not isinstance(process_set, ProcessSet):
            raise ValueError(
                f"{kind} with process_set={process_set!r}: several sets at once are for one "
                "process that drives all ranks; give the one that this rank is in"
            )
        if not self.sets.has(process_set):
            raise ValueError(f"{kind} in {process_set!r}, which isn't registered on this rank")
        members = process_set.ranks
        if self._rank not in members:
            raise ValueError(
                f"{kind} in {process_set!r}, called by rank {self._rank}, which is no member: ask "
                "process_set.included() before"
            )
        return members

    def _numbered(self, set_id: int, name: str) -> str:
        number = self._numbers.get((set_id, name), 0) + 1
        self._numbers[set_id, name] = number
        return f"{name}.{self._joins}.{number}" if self._joins else f"{name}.{number}"

    def _begin(self, handle: RankedHandle) -> RankedHandle:
        key = handle.request.key
        before = self._pending.get(key)
        if before is not None and before.response is None:
            raise ValueError(
                f"{handle.request.kind} {handle.request.name!r}: there is one of this name already "
                f"on rank {self._rank}, which hasn't been waited for yet; give each its own name"
            )
        self._pending[key] = handle
        timeline.begin(handle.request)
        self.send(handle)
        return handle

    def poll(self, handle: Handle) -> bool:
        assert isinstance(handle, RankedHandle)
        if handle.finished:
            return True
        if not self.look(handle):
            return False
        return all(output.is_ready() for output in handle.outputs)

    def synchronize(self, handle: Handle) -> Any:
        assert isinstance(handle, RankedHandle)
        if not handle.finished:
            self._finish(handle)
        return handle.results

    def _finish(self, handle: RankedHandle) -> None:
        try:
            self.wait(handle)
        finally:
            self._pending.pop(handle.request.key, None)
        response, call = handle.response, handle.call
        assert response is not None
        timeline.end(handle.request)
        if response.error:
            raise HorovodInternalError(response.error)
        handle.finished = True
        if call is None:
            return
        pairs = zip(handle.outputs, call.tensors, strict=True)
        results: list[Any] = [to_tensor(output, tensor) for output, tensor in pairs]
        if call.targets is not None:
            for target, result in zip(call.targets, results, strict=True):
                write(target, result)
            results = list(call.targets)
        if call.kind == "allgather":
            handle.rows = [
                [response.requests[rank].shapes[i][0] for rank in response.ranks]
                for i in range(len(results))
            ]
        elif call.kind == "alltoall":
            handle.received = received_splits(response, self._rank)
            if call.splits is not None:
                results.append(torch.tensor(handle.received, dtype=torch.int32))
        handle.results, handle.arrays = results, ()

    # --- without tensors -----------------------------------------------------------------------

    def _meet(self, kind: str, members: Sequence[int], set_id: int, detail: str = "") -> Response:
        name = "join" if kind == "join" else self._numbered(set_id, kind)
        request = Request(kind, name, tuple(members), set_id, detail=detail)
        handle = RankedHandle(request, None, ())
        self._begin(handle)
        self._finish(handle)
        assert handle.response is not None
        return handle.response

    def barrier(self, process_set: ProcessSet) -> None:
        members = self._members(process_set, "barrier")
        self._meet("barrier", members, process_set.process_set_id or 0)

    def join(self) -> int:
        response = self._meet("join", range(self.size), 0)
        self._joins += 1
        # Ranks that joined early have counted fewer unnamed operations than the others.
        self._numbers = {key: n for key, n in self._numbers.items() if key[0]}
        return response.last

    def agree_on_set(self, what: str, ranks: Sequence[int]) -> None:
        self._meet("process_set", range(self.size), 0, f"{what} {list(ranks)}")

    def objects(self, value: Any, process_set: ProcessSet, root: int | None) -> list[Any]:
        own = root is None or root == self._rank
        data = pickle.dumps(value) if own else b""
        row = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        handle = self.start(HorovodRequest("allgather", [row], process_set=process_set))
        (rows,) = self.synchronize(handle)
        assert handle.rows is not None
        texts = rows.split(handle.rows[0])
        return [pickle.loads(text.numpy().tobytes()) for text in texts if len(text)]

    def close(self) -> None:
        """Nothing may be left that nobody has waited for."""
        for handle in list(self._pending.values()):
            self._finish(handle)
