"""A collective on a per-device tensor: one of XLA's, eagerly or in a compiled step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

from xla_dtensor.base import executor
from xla_dtensor.forms.form import Form, device_form
from xla_dtensor.forms.per_device import union
from xla_dtensor.forms.storage import Storage
from xla_dtensor.horovod.collectives.collective import Axes, HorovodCollective, Sets
from xla_dtensor.mesh import Frame
from xla_dtensor.movement.relayout import relayout
from xla_dtensor.rules.cost import Collective
from xla_dtensor.tensors.device_tensor import XLATensor


@dataclass(frozen=True)
class _OnDevices:
    """A collective as `relayout` takes it."""

    collective: HorovodCollective
    sets: Sets
    axes: Axes

    def moves(self, source: Form, target: Form) -> list[Collective]:
        """What it communicates."""
        assert target.frame is not None
        count = math.prod(target.frame.sizes[name] for name in self.axes)
        nbytes = math.prod(source.shape) * source.dtype.itemsize
        kind = self.collective.xla_name if self.sets is None else "all-gather"
        return [Collective(kind, self.axes, count, nbytes * (count if "gather" in kind else 1))]

    def __call__(self, array: Any, source: Form, target: Form) -> Any:
        assert target.frame is not None
        own, result = len(source.varying), len(target.varying)

        def one(block: Any) -> Any:
            value = block.reshape(block.shape[own:])
            value = self.collective.on_device(value, self.axes, self.sets)
            return value.reshape((1,) * result + value.shape)

        spec = jax.sharding.PartitionSpec
        with jax.enable_x64(True):
            return jax.shard_map(
                one,
                mesh=target.frame.jax_mesh,
                in_specs=spec(*source.varying),
                out_specs=spec(*target.varying),
                check_vma=False,
            )(array)


def run(collective: HorovodCollective, sets: Sets, tensor: XLATensor, frame: Frame) -> XLATensor:
    """What each device has afterwards; below autograd.

    Args:
        collective: as devices compute it (`HorovodCollective.placed`).
        sets: which of the frame's devices are together; None for all.
        tensor: a per-device tensor.
        frame: its mesh.
    """
    axes = tuple(axis.name for axis in frame.axes if axis.size > 1)
    if not tensor.is_meta:
        executor.current().place(tensor._storage_, frame)
    source = tensor._form.placed(frame)
    source.check_axes(collective.kind, frame)
    count = len(sets[0]) if sets else math.prod(frame.sizes[name] for name in axes)
    shape, stride = source.shape, None
    if collective.keeps_shape:
        stride = source.stride  # the memory order, so that it can take the tensor's place
    else:
        shape = (collective.result_rows(shape[0], count), *shape[1:])
    same = sets is None and collective.same_on_all
    varying = () if same else union(frame, [source.varying, axes])
    target = device_form(frame, shape, stride, 0, source.dtype, varying, source.meta)
    if source.meta:
        return XLATensor(Storage(None, target), target)
    how = _OnDevices(collective, sets, axes)
    result: XLATensor = relayout(tensor, source, target, how)
    return result
