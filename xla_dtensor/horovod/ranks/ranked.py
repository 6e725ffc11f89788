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
from xla_dtensor.horovod.collectives.collective import HorovodCollective, Request
from xla_dtensor.horovod.collectives.kinds import Allgather, Barrier, Join, ProcessSetChange
from xla_dtensor.horovod.collectives.requests import Handle, HorovodRequest, Response
from xla_dtensor.horovod.ranks.exchange import Exchanged
from xla_dtensor.horovod.ranks.ranked_tensors import put_into, request_of, to_array, to_tensor
from xla_dtensor.horovod.world.process_sets import ProcessSet, ProcessSets
from xla_dtensor.horovod.world.timeline import timeline
from xla_dtensor.horovod.world.world import World


class RankedHandle(Handle):
    """A handle of what other ranks have to take part in.

    Args:
        request: the rank's part.
        call: what the user asked for; None for what has no tensors.

    Attributes:
        arrays: the tensors' values.
        response: what came of it; None before.
        outputs: what has become of its tensors.
    """

    def __init__(
        self, request: Request, call: HorovodRequest | None, arrays: Sequence[Any]
    ) -> None:
        super().__init__(request.name)
        self.request, self.call, self.arrays = request, call, arrays
        self.response: Response | None = None
        self.outputs: Sequence[Exchanged] = ()


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
        collective = call.collective.of_rank(self._rank)
        request = request_of(collective, name, call.tensors, members, set_id)
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
                f"{handle.request.collective.kind} {handle.request.name!r}: there is one of this "
                f"name already on rank {self._rank}, which hasn't been waited for yet; give each "
                "its own name"
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
        return all(output.is_ready(self._rank) for output in handle.outputs)

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
        results: list[Any] = [to_tensor(output, self._rank, tensor) for output, tensor in pairs]
        results = put_into(call.targets, results)
        requests = list(response.requests.values())
        position = response.ranks.index(self._rank)
        handle.requests, handle.position = requests, position
        handle.results = results + call.collective.more_results(requests, position)
        handle.arrays = ()

    # --- without tensors -----------------------------------------------------------------------

    def _meet(
        self, collective: HorovodCollective, name: str, ranks: Sequence[int], set_id: int = 0
    ) -> Response:
        handle = RankedHandle(Request(collective, name, tuple(ranks), set_id), None, ())
        self._begin(handle)
        self._finish(handle)
        assert handle.response is not None
        return handle.response

    def barrier(self, process_set: ProcessSet) -> None:
        members = self._members(process_set, Barrier.kind)
        set_id = process_set.process_set_id or 0
        self._meet(Barrier(), self._numbered(set_id, Barrier.kind), members, set_id)

    def join(self) -> int:
        response = self._meet(Join(), Join.kind, range(self.size))
        self._joins += 1
        # Ranks that joined early have counted fewer unnamed operations than the others.
        self._numbers = {key: n for key, n in self._numbers.items() if key[0]}
        return response.last

    def agree_on_set(self, what: str, ranks: Sequence[int]) -> None:
        change = ProcessSetChange(f"{what} {list(ranks)}")
        self._meet(change, self._numbered(0, change.kind), range(self.size))

    def objects(self, value: Any, process_set: ProcessSet, root: int | None) -> list[Any]:
        own = root is None or root == self._rank
        data = pickle.dumps(value) if own else b""
        row = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        handle = self.start(HorovodRequest(Allgather(), [row], None, process_set))
        (rows,) = self.synchronize(handle)
        texts = rows.split([request.shapes[0][0] for request in handle.requests])
        return [pickle.loads(text.numpy().tobytes()) for text in texts if len(text)]

    def close(self) -> None:
        """Nothing may be left that nobody has waited for."""
        for handle in list(self._pending.values()):
            self._finish(handle)
