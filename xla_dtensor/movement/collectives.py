"""Collectives on per-device tensors: explicit communication along a mesh dim.

Each is one collective of XLA's under ``jax.shard_map``. ``group`` is a mesh of one dim, a
``(mesh, dim)``, or ``mesh.get_group(dim)``. They are differentiable as torch's functional
collectives are, which end in the same functions (`integration/functional_collectives.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base import thread_state
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import device_form
from xla_dtensor.forms.per_device import union
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh.group import MeshGroup, group_of, resolve_group
from xla_dtensor.movement.collective_kernels import check_tensor, run
from xla_dtensor.tensors.device_tensor import XLATensor

__all__ = [
    "Group",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "broadcast",
    "permute",
    "reduce_scatter",
]

Group: TypeAlias = MeshGroup | DeviceMesh | tuple[DeviceMesh, int | str]


def _group(group: Group) -> MeshGroup:
    found = resolve_group(group)
    if found is None:
        raise UnsupportedOpError(
            f"a collective along {group!r}: give an xla mesh of one dim, (mesh, dim) or "
            "mesh.get_group(dim)"
        )
    return found


def _native(name: str, tensor: Any, *args: Any) -> Any:
    # Imported with torch.distributed, which registers their gradients.
    import torch.distributed._functional_collectives

    check_tensor(name, tensor)  # without one of ours torch looks for a process group
    return getattr(torch.ops._c10d_functional, name)(tensor, *args)


def all_reduce(tensor: XLATensor, group: Group, op: str = "sum") -> XLATensor:
    """The reduction of the devices' values along a mesh dim, the same on all of them.

    The gradient of a sum is the sum of the devices' gradients.

    Args:
        op: sum, avg, product, max, min, band, bor or bxor. An all-reduce, except for the bitwise
            ones, which gather.

    Raises:
        UnsupportedOpError: the dtype has no such reduction.
        RuntimeError: the gradient of a reduction other than a sum, as in torch.
    """
    return _native("all_reduce", tensor, op, _group(group))


def all_gather(tensor: XLATensor, group: Group, dim: int = 0) -> XLATensor:
    """The devices' values along a mesh dim, concatenated along tensor dim ``dim``.

    The gradient is a reduce-scatter of the devices' gradients.
    """
    group = _group(group)
    check_tensor("all_gather", tensor)
    moved = tensor.movedim(dim, 0) if tensor.ndim else tensor
    gathered = _native("all_gather_into_tensor", moved, group.size(), group)
    return gathered.movedim(0, dim)


def reduce_scatter(tensor: XLATensor, group: Group, dim: int = 0, op: str = "sum") -> XLATensor:
    """The reduction of the devices' values, of which each device gets its piece of ``dim``.

    The gradient of a sum is an all-gather of the devices' gradients.

    Args:
        op: as of `all_reduce`. A reduce-scatter for sum and avg; the others are an all-to-all and
            a reduction of what has arrived.

    Raises:
        UnsupportedOpError: the dim doesn't divide, or the dtype has no such reduction.
        RuntimeError: the gradient of a reduction other than a sum, as in torch.
    """
    group = _group(group)
    check_tensor("reduce_scatter", tensor)
    moved = tensor.movedim(dim, 0) if tensor.ndim else tensor
    return _native("reduce_scatter_tensor", moved, op, group.size(), group).movedim(0, dim)


def all_to_all(tensor: XLATensor, group: Group) -> XLATensor:
    """Piece ``j`` of device ``i``'s dim 0 becomes piece ``i`` of device ``j``'s.

    The gradient is the same of the devices' gradients.

    Raises:
        UnsupportedOpError: the dim doesn't divide.
    """
    group = _group(group)
    size = tensor.shape[0] if tensor.ndim else 0
    sizes = [size // group.size()] * group.size()
    return _native("all_to_all_single", tensor, sizes, sizes, group)


class _Linear(torch.autograd.Function):
    """Collectives for which torch has no gradient formula."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, name: str, group: MeshGroup, option: Any) -> Any:
        ctx.call = name, group, option
        return run(name, tensor, group, option)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        name, group, option = ctx.call
        if name == "permute":
            back = tuple((dst, src) for src, dst in option)
            return _Linear.apply(grad, "permute", group, back), None, None, None
        total = all_reduce(grad, group)
        at_source = axis_index(group.mesh, group.dim) == option
        return torch.where(at_source, total, 0), None, None, None


def broadcast(tensor: XLATensor, group: Group, src: int = 0) -> XLATensor:
    """The value of the device at coordinate ``src`` along a mesh dim, on all of them.

    An all-reduce of that value and of zeros. The gradient is the sum of the devices' gradients at
    the source, 0 elsewhere.

    Raises:
        UnsupportedOpError: no device has that coordinate.
    """
    check_tensor("broadcast", tensor)
    return _Linear.apply(tensor, "broadcast", _group(group), src)


def permute(tensor: XLATensor, group: Group, src_dst: Sequence[int]) -> XLATensor:
    """The device at coordinate ``i`` along a mesh dim sends its value to ``src_dst[i]``.

    The gradient goes back the same ways.

    Raises:
        UnsupportedOpError: ``src_dst`` is no permutation of the coordinates.
    """
    check_tensor("permute", tensor)
    pairs = tuple(enumerate(src_dst))
    return _Linear.apply(tensor, "permute", _group(group), pairs)


def axis_index(mesh: DeviceMesh, dim: int | str = 0) -> XLATensor:
    """The coordinate of each device along a mesh dim: an int64 per-device tensor of shape []."""
    group = group_of(mesh, dim)
    frame, axes = group.frame, group.axes
    sizes = [frame.sizes[name] for name in axes]
    varying = union(frame, [axes])
    with jax.enable_x64(True):
        index = jnp.arange(group.size(), dtype=jnp.int64).reshape(sizes)
        index = index.transpose([axes.index(name) for name in varying])
        form = device_form(frame, (), dtype=torch.int64, varying=varying)
        if thread_state.current() is None:
            index = jax.device_put(index, form.sharding)
    return XLATensor(Storage(index, form), form)
