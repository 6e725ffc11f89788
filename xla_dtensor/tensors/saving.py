"""Pickling, ``copy`` and ``torch.save``: a tensor's full value and its layout are saved.

Of one that varies from device to device it is the values of all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base import executor, map_location, torch_private
from xla_dtensor.base.torch_private.attributes import make_parameter
from xla_dtensor.errors import MeshMismatchError, UnsupportedOpError
from xla_dtensor.forms.form import device_form, sharded_form
from xla_dtensor.forms.host_values import fetch, to_host
from xla_dtensor.forms.read import reading
from xla_dtensor.mesh import frame_of
from xla_dtensor.tensors.backend import backend

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def reduce_tensor(tensor: Any, own: frozenset[str]) -> tuple[Any, ...]:
    """What ``__reduce_ex__`` returns for a sharded or per-device tensor.

    Args:
        own: the names of attributes that aren't the user's.
    """
    form = tensor._form
    attributes = {k: v for k, v in vars(tensor).items() if k not in own and k != "_is_param"}
    mesh = form.mesh
    rest: tuple[Any, ...] = (attributes,) if attributes else ()
    if form.varying:
        value, rest = _of_all_devices(tensor), (attributes, form.varying)
        mesh = form.frame.root if mesh is None else mesh
    else:
        with torch.no_grad():
            value = tensor.detach().cpu()
    return rebuild_tensor, (
        value,
        mesh,
        None if form.placements is None else tuple(map(_encoded, form.placements)),
        tensor.requires_grad,
        isinstance(tensor, torch.nn.Parameter),
        *rest,
    )


def _of_all_devices(tensor: Any) -> torch.Tensor:
    """The values of a tensor that varies: a dim for each mesh axis along which it does, and its
    own."""
    form = tensor._form
    if form.unreduced:
        raise UnsupportedOpError(
            f"saving a tensor {form} that varies and has reductions pending: redistribute it first"
        )
    executor.current().refuse("saving a tensor")
    lead = form.array_shape[: len(form.varying)]
    with reading(tensor) as array:
        return to_host(fetch(array, (*lead, *form.shape)))


def _on_each_device(
    value: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[tuple[Any, ...]] | None,
    varying: tuple[str, ...],
) -> Any:
    """What `_of_all_devices` has taken apart."""
    frame, shape = frame_of(mesh), tuple(value.shape[len(varying) :])
    missing = [name for name in varying if name not in frame.sizes]
    if missing:
        raise MeshMismatchError(
            f"a tensor that was saved varying along {missing}: {mesh!r} is now cut into {frame!r}"
        )
    if placements is None:
        form = device_form(frame, shape, dtype=value.dtype, varying=varying)
    else:
        placed = tuple(_decoded(*p) for p in placements)
        form = sharded_form(mesh, placed, shape, dtype=value.dtype, varying=varying)
    return backend().from_host(value, form)


def rebuild_tensor(
    value: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[tuple[Any, ...]] | None,
    requires_grad: bool,
    is_param: bool,
    attributes: dict[str, Any] | None = None,
    varying: tuple[str, ...] = (),
) -> torch.Tensor:
    """The tensor that `reduce_tensor` took apart; its full value where ``torch.load`` is told to
    put it, if that is no xla device."""
    result: Any
    if map_location.leaves_xla():
        result = value.to(map_location.device_for("xla:0"))
        if is_param:
            result = torch.nn.Parameter(result, requires_grad)
    elif varying and mesh is not None:
        result = _on_each_device(value, mesh, placements, varying)
    elif mesh is None or placements is None:
        result = value.to("xla")
    else:
        result = backend().distribute_tensor(value, mesh, [_decoded(*p) for p in placements])
    result.requires_grad_(requires_grad)
    if is_param and not isinstance(result, torch.nn.Parameter):
        make_parameter(result)
    for name, attribute in (attributes or {}).items():
        setattr(result, name, attribute)
    return result


def _encoded(placement: Placement) -> tuple[Any, ...]:
    # Plain data: torch's placement classes may be unpickled only after torch.distributed.tensor
    # has been imported.
    from torch.distributed.tensor.placement_types import Partial, Shard

    if isinstance(placement, torch_private.StridedShard):
        return "StridedShard", placement.dim, placement.split_factor
    if isinstance(placement, Shard):
        return "Shard", placement.dim
    if isinstance(placement, Partial):
        return "Partial", placement.reduce_op
    return ("Replicate",)


def _decoded(kind: str, *arguments: Any) -> Placement:
    from torch.distributed.tensor import placement_types

    if kind == "StridedShard":
        dim, split_factor = arguments
        return torch_private.StridedShard(dim, split_factor=split_factor)
    return getattr(placement_types, kind)(*arguments)
