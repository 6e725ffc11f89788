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
from xla_dtensor.horovod.in_trace import TraceScope
from xla_dtensor.horovod.process_sets import ProcessSet, ProcessSets
from xla_dtensor.horovod.rank_number import PerRank, RankNumber
from xla_dtensor.horovod.ranks import per_device
from xla_dtensor.horovod.ranks.disagreements import disagreement
from xla_dtensor.horovod.ranks.kernels import Kernel
from xla_dtensor.horovod.ranks.one_per_rank import all_at_once
from xla_dtensor.horovod.requests import Request
from xla_dtensor.horovod.timeline import timeline
from xla_dtensor.horovod.world import Handle, HorovodRequest, World
from xla_dtensor.horovod.write_into import write
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

    def is_root(self, rank: int) -> bool:
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
            handle.results = self._of_each_rank(call, handle.name)
        else:
            request = self._checked(call, handle.name)
            timeline.begin(request)
            timeline.launch([request])
            handle.results = self._of_tensors(call)
            timeline.end(request)
            if call.kind == "alltoall":
                count = len(request.ranks)
                handle.received = list(request.splits) or [request.shapes[0][0] // count] * count
        self._waiting[handle.name] = TraceScope()
        return handle

    def poll(self, handle: Handle) -> bool:
        return True

    def synchronize(self, handle: Handle) -> Any:
        self._waiting.pop(handle.name, None)
        handle.finished = True
        return handle.results

    def _checked(self, call: HorovodRequest, name: str) -> Request:
        """A rank's part. Raises where processes would: what is wrong is wrong on all ranks."""
        splits = _equal_splits(call)
        shapes = tuple(tuple(tensor.shape) for tensor in call.tensors)
        dtypes = tuple(str(tensor.dtype) for tensor in call.tensors)
        members = _members(call.process_set)
        root = call.root
        if call.kind == "broadcast":
            root = members[0][position] if (position := _root(call, members)) >= 0 else call.root
        request = Request(
            call.kind, name, tuple(members[0]), 0, shapes, dtypes, call.op.name,
            root=root, splits=splits,
        )  # fmt: skip
        wrong = disagreement(dict.fromkeys(request.ranks, request))
        if wrong:
            raise HorovodInternalError(wrong)
        rows = len(request.ranks)
        if call.kind == "reducescatter" and any(shape[0] % rows for shape in shapes):
            raise UnsupportedOpError(
                f"reducescatter of tensors of shapes {[list(s) for s in shapes]} over {rows} "
                "devices: a per-device tensor has one shape on all of them, so dim 0 has to "
                "divide; pad it, or give one tensor per rank, hvd.per_rank(fn) or hvd.run"
            )
        if splits and len(set(splits)) > 1:
            raise UnsupportedOpError(
                f"alltoall with splits {list(splits)}: a per-device tensor has one shape on all "
                "devices; give equal splits, or one tensor per rank (a PerRank of hvd.per_rank)"
            )
        return request

    def _of_tensors(self, call: HorovodRequest) -> list[Any]:
        kernel = self._kernel(call)
        results = []
        for position, tensor in enumerate(call.tensors):
            value: Any = self._value(kernel, tensor, call)
            if call.targets is not None:
                write(call.targets[position], value)
                value = call.targets[position]
            results.append(value)
        if call.kind == "alltoall" and call.splits is not None:
            results.append(torch.tensor(_equal_splits(call), dtype=torch.int32))
        return results

    def _value(self, kernel: Kernel, tensor: Any, call: HorovodRequest) -> Any:
        on_host = tensor.device.type == "cpu"
        given = tensor.detach().to("xla") if on_host else tensor.detach()
        check_tensor(call.kind, given)
        if call.kind == "alltoall" and call.splits is not None:
            given = given[: sum(_equal_splits(call))]
        value = per_device.run(kernel, given, self._frame(given))
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

    def _kernel(self, call: HorovodRequest) -> Kernel:
        members = _members(call.process_set)
        whole = members == [list(range(self.size))]
        if not whole and call.kind not in ("allreduce", "broadcast"):
            named = sorted(rank for ranks in members for rank in ranks)
            if named != list(range(self.size)):
                raise UnsupportedOpError(
                    f"{call.kind} in a process set of ranks {named}: the devices outside of it "
                    "would have no result, where a per-device tensor has one of the same shape on "
                    "all. Name all sets at once, process_set=[even, odd], which have equal sizes "
                    "and every rank in one"
                )
        return Kernel(
            call.kind,
            call.op,
            call.prescale,
            call.postscale,
            len(members[0]),
            max(_root(call, members), 0),
            None if whole else tuple(map(tuple, members)),
        )

    def _of_each_rank(self, call: HorovodRequest, name: str) -> list[Any]:
        executor.current().not_in_step(
            f"{call.kind} of a value for each rank in a compiled step: shapes that differ by "
            "rank have no per-device tensor; do it outside of the step"
        )
        return all_at_once(call, name, self._mesh)

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


def _root(call: HorovodRequest, members: list[list[int]]) -> int:
    """The position of a broadcast's source in its set, and in the other sets; -1 if it is in
    none."""
    found = [ranks.index(call.root) for ranks in members if call.root in ranks]
    return found[0] if found else -1


def _equal_splits(call: HorovodRequest) -> tuple[int, ...]:
    if call.splits is None:
        return ()
    splits = call.splits
    return tuple(splits.tolist() if isinstance(splits, torch.Tensor) else splits)
