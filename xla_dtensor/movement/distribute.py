"""What `distribute_tensor` does below autograd: pad a value, and give each device its shard."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base import executor
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.errors import PerDeviceValueError
from xla_dtensor.forms.form import Form, sharded_form
from xla_dtensor.forms.host_values import to_devices
from xla_dtensor.forms.read import logical_value
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh import Frame
from xla_dtensor.movement import source_rank
from xla_dtensor.movement.relayout import constrain
from xla_dtensor.runtime import arrays
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor, keep_leaf_gradients_sharded

_padders: Cache[tuple[Form, Any], Any] = Cache("distribute_tensor", 512)


def lay_out(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    own: np.ndarray | None = None,
    *,
    check: bool = False,
) -> XLAShardedTensor:
    """`distribute_tensor` of a value that all processes have.

    Args:
        tensor: no sharded tensor.
        mesh: an xla mesh.
        placements: one per mesh dim.
        own: the value on the host where it may be another one in each process.
        check: compare what several processes hold of ``own``.
    """
    form = sharded_form(
        mesh,
        placements,
        tuple(tensor.shape),
        _dense_stride(tensor),
        dtype=tensor.dtype,
        meta=tensor.is_meta,
    )
    if form.meta:
        array = None
    elif own is not None:
        if check:
            source_rank.check_shared(own, form)
        array = source_rank.put_own(own, form)
    else:
        array = _placed(tensor, form)
    result = XLAShardedTensor(Storage(array, form), form)
    if tensor.requires_grad:
        result.requires_grad_(True)
        keep_leaf_gradients_sharded(result)
    return result


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides, or a copy's if it has gaps or overlaps."""
    model = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty_like(model).stride()


def _placed(tensor: torch.Tensor, form: Form) -> Any:
    running = executor.current()
    if not isinstance(tensor, XLATensor):
        return running.new_array(
            form,
            lambda: to_devices(tensor.detach().cpu(), form),
            lambda trace: constrain(trace.host_tensor(tensor), form),
        )
    if tensor.varying:
        raise PerDeviceValueError(
            f"distribute_tensor: a per-device tensor of shape {list(tensor.shape)} varies "
            f"along {list(tensor.varying)}, so it isn't one value to deal out. Make it one "
            "first (xd.collectives.broadcast, all_reduce), or say that the devices hold parts "
            "of a whole: DTensor.from_local(x, mesh, placements)"
        )
    return running.new_array(
        form,
        lambda: _padded(logical_value(tensor), tensor._form.frame, form),
        lambda trace: constrain(logical_value(tensor), form),
    )


def _padded(value: Any, frame: Frame | None, form: Form) -> Any:
    """The array in ``form`` of a logical value that lies on ``frame``."""
    assert form.frame is not None
    with jax.enable_x64(True):
        in_place = frame is not None and frame.device_ids == form.frame.device_ids
        # A program's outputs lie on the devices of its inputs: to others the result is copied.
        sharding = form.sharding if in_place else None
        padder = _padders.get_or_make(
            (form, sharding),
            lambda: jax.jit(lambda value: form.physical(value), out_shardings=sharding),
        )
        padded = padder(value)
        return padded if in_place else arrays.put(padded, form.sharding)
