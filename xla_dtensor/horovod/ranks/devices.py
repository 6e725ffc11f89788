"""Ranks that are the devices of one process: one call on a per-device tensor is every rank's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor import runtime
from xla_dtensor.base import executor
from xla_dtensor.errors import HorovodInternalError, MeshError, UnsupportedOpError
from xla_dtensor.horovod.collectives.collective import HorovodCollective, Sets
from xla_dtensor.horovod.collectives.requests import Handle, HorovodRequest
from xla_dtensor.horovod.ranks import per_device
from xla_dtensor.horovod.ranks.disagreements import disagreement
from xla_dtensor.horovod.ranks.one_per_rank import all_at_once
from xla_dtensor.horovod.ranks.ranked_tensors import put_into, request_of
from xla_dtensor.horovod.world.in_trace import TraceScope
from xla_dtensor.horovod.world.process_sets import ProcessSet, ProcessSets
from xla_dtensor.horovod.world.rank_number import PerRank, RankNumber
from xla_dtensor.horovod.world.timeline import timeline
from xla_dtensor.horovod.world.world import World
from xla_dtensor.mesh import Frame, current_mesh, frame_of, root_mesh
from xla_dtensor.mesh.group import whole_group_of
from xla_dtensor.movement.collective_kernels import check_tensor
from xla_dtensor.movement.collectives import index_in
from xla_dtensor.movement.device_values import from_device_values
from xla_dtensor.tensors.device_tensor import XLATensor


class Devices(World):
    """The ranks are all devices of a mesh, which this process drives.

    Args:
        mesh: by default the current mesh, or all devices there are.
    """

    is_alone = True

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        mesh = mesh or current_mesh()
        if mesh is None:
            runtime.start()
            mesh = DeviceMesh("xla", list(range(runtime.device_count())), mesh_dim_names=("rank",))
        self._mesh = root_mesh(mesh)
        self.size = self.local_size = self._mesh.size()
        self.sets = ProcessSets(self.size)
        self._waiting: dict[str, TraceScope] = {}
        self._count = 0

    @property
    def rank(self) -> Any:
        return self._number("hvd.rank()")

    @property
    def local_rank(self) -> Any:
        return self._number("hvd.local_rank()")

    def _number(self, text: str) -> Any:
        if self.size == 1:
            return 0
        return RankNumber(index_in(whole_group_of(self._mesh)), text)

    @property
    def is_coordinator(self) -> bool:
        return True

    def position_in(self, ranks: Sequence[int]) -> Any:
        if len(ranks) == self.size:
            return self._number("process_set.rank()")
        places = [ranks.index(r) if r in ranks else -1 for r in range(self.size)]
        text = "process_set.rank()"
        return RankNumber(from_device_values(list(map(torch.tensor, places)), self._mesh), text)

    @property
    def mesh(self) -> DeviceMesh:
        return self._mesh

    def on_devices(self, value: torch.Tensor) -> torch.Tensor:
        return value.to("xla")

    # --- collectives -------------------------------------------------------------------------

    def start(self, call: HorovodRequest) -> Handle:
        before = self._waiting.get(f"{call.kind}.{call.name}")
        if call.name is not None and before is not None and before.is_here():
            raise ValueError(
                f"{call.kind} {call.name!r}: there is one of this name already, which nobody has "
                "waited for yet; give each its own name"
            )
        self._count += 1
        handle = Handle(f"{call.kind}.{call.name or f'noname.{self._count}'}")
        if any(isinstance(tensor, PerRank) for tensor in call.tensors):
            executor.current().not_in_step(
                f"{call.kind} of a value for each rank in a compiled step: shapes that differ by "
                "rank have no per-device tensor; do it outside of the step"
            )
            handle.results = all_at_once(call, handle.name, self._mesh)
        elif call.collective.differs_by_rank:
            raise UnsupportedOpError(
                f"{call.kind} of one per-device tensor, with splits that differ from rank to rank: "
                "what comes has other shapes on each, and a per-device tensor one on all; give a "
                "tensor for each rank, too, hvd.PerRank(x.local_values())"
            )
        else:
            self._of_tensors(call, handle)
        self._waiting[handle.name] = TraceScope()
        return handle

    def poll(self, handle: Handle) -> bool:
        return True

    def synchronize(self, handle: Handle) -> Any:
        self._waiting.pop(handle.name, None)
        handle.finished = True
        return handle.results

    def _of_tensors(self, call: HorovodRequest, handle: Handle) -> None:
        """What is wrong raises where processes would: it is wrong on all ranks."""
        sets = _members(call.process_set)
        ranks = call.collective.set_of(sets)
        request = request_of(call.collective, handle.name, call.tensors, ranks)
        wrong = disagreement(dict.fromkeys(ranks, request))
        if wrong:
            raise HorovodInternalError(wrong)
        call.collective.check_on_devices(request)
        collective, apart = call.collective.placed(ranks), self._apart(call, sets)
        timeline.begin(request)
        timeline.launch([request])
        results: list[Any] = [self._value(call, collective, apart, t) for t in call.tensors]
        handle.requests = [request] * len(ranks)
        handle.results = put_into(call.targets, results)
        handle.results += call.collective.more_results(handle.requests, 0)
        timeline.end(request)

    def _value(
        self, call: HorovodRequest, collective: HorovodCollective, apart: Sets, tensor: Any
    ) -> Any:
        on_host = tensor.device.type == "cpu"
        given = tensor.detach().to("xla") if on_host else tensor.detach()
        check_tensor(call.kind, given)
        sent = call.collective.sent_rows()
        if sent is not None:
            given = given[:sent]
        value = per_device.run(collective, apart, given, self._frame(given))
        if on_host and not value.varying and executor.trace() is None:
            return value.cpu()
        return value

    def _frame(self, tensor: XLATensor) -> Frame:
        """The tensor's mesh, which has the devices of the ranks in their order."""
        own, frame = frame_of(self._mesh), tensor._form.frame
        if frame is None or frame is own:
            return own
        if frame.device_ids != own.device_ids:
            raise MeshError(
                f"horovod's ranks are the devices {list(own.device_ids)}, the tensor lies on "
                f"{list(frame.device_ids)} of {frame.root!r}: call xd.set_mesh(mesh) before "
                "hvd.init()"
            )
        return frame

    def _apart(self, call: HorovodRequest, sets: list[list[int]]) -> Sets:
        if sets == [list(range(self.size))]:
            return None
        named = sorted(rank for ranks in sets for rank in ranks)
        if not call.collective.keeps_shape and named != list(range(self.size)):
            raise UnsupportedOpError(
                f"{call.kind} in a process set of ranks {named}: the devices outside of it would "
                "have no result, where a per-device tensor has one of the same shape on all. Name "
                "all sets at once, process_set=[even, odd], which have equal sizes and every rank "
                "in one"
            )
        return tuple(map(tuple, sets))

    # --- the rest ----------------------------------------------------------------------------

    def barrier(self, process_set: ProcessSet) -> None:
        return None

    def join(self) -> int:
        executor.current().not_in_step("hvd.join() in a compiled step: call it after the last step")
        return self.size - 1

    def agree_on_set(self, what: str, ranks: Sequence[int]) -> None:
        return None

    def per_rank(self, function: Callable[[int], Any]) -> Any:
        values = [function(rank) for rank in range(self.size)]
        if all(isinstance(value, int | float) for value in values):
            values = [torch.tensor(value) for value in values]
        plain = all(
            isinstance(v, torch.Tensor) and v.device.type == "cpu" and not v.is_sparse
            for v in values
        )
        if not plain or len({(v.shape, v.dtype) for v in values}) > 1:
            return PerRank(values)
        return from_device_values(values, self._mesh)

    def objects(self, value: Any, process_set: ProcessSet, root: int | None) -> list[Any]:
        ranks = process_set.ranks if root is None else [root]
        if isinstance(value, PerRank):
            return [value[rank] for rank in ranks]
        return [copy.deepcopy(value) for _ in ranks]


def _members(process_set: ProcessSet | Sequence[ProcessSet]) -> list[list[int]]:
    sets = [process_set] if isinstance(process_set, ProcessSet) else list(process_set)
    members = [each.ranks for each in sets]
    everyone = [rank for ranks in members for rank in ranks]
    if len({len(ranks) for ranks in members}) != 1 or len(set(everyone)) != len(everyone):
        raise ValueError(
            f"process_set={sets}: several sets at once have equal sizes, and no rank is in two"
        )
    return members
