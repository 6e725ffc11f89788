"""Collectives on per-device tensors: explicit communication along a mesh dim.

Each is one collective of XLA's under ``jax.shard_map``. ``group`` is a mesh of one dim, a
``(mesh, dim)``, or ``mesh.get_group(dim)``. They are differentiable as torch's functional
collectives are, which end in the same functions
(`integration/distributed/functional_collectives.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base import executor, torch_private
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import device_form
from xla_dtensor.forms.per_device import union
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh.group import MeshGroup, group_of, resolve_group
from xla_dtensor.movement.collective_kernels import check_tensor, run
from xla_dtensor.runtime import arrays
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
    torch_private.load_functional_collectives()
    check_tensor(name, tensor)  # without one of ours torch looks for a process group
    return getattr(torch.ops._c10d_functional, name)(tensor, *args)


def all_reduce(tensor: XLATensor, group: Group, op: str = "sum") -> XLATensor:
    """The reduction of the devices' values along a mesh dim, the same on all of them.

    The gradient of a sum is the sum of the devices' gradients, as of torch's functional
    ``all_reduce``.

    Args:
        tensor: a per-device tensor of any shape and dtype.
        group: along which devices: a mesh of one dim, ``(mesh, dim)`` or ``mesh.get_group(dim)``.
        op: sum, avg, product, max, min, band, bor or bxor. An all-reduce, except for the bitwise
            ones, which gather. avg is of floating point and complex numbers, max and min of real
            ones, band, bor and bxor of integers; of bools a sum is "or", a product "and".

    Returns:
        a per-device tensor of the same shape and dtype, which doesn't vary along the mesh dim.

    Raises:
        UnsupportedOpError: ``tensor`` is no per-device tensor, or its dtype has no such reduction.
        MeshError: no such mesh dim.
        RuntimeError: the gradient of a reduction other than a sum, as in torch.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        index = xd.collectives.axis_index(mesh, "tp")  # 0, 1, 2, 3
        assert xd.collectives.all_reduce(index, (mesh, "tp")).item() == 6
        assert xd.collectives.all_reduce(index, mesh["tp"], "max").item() == 3
    """
    return _native("all_reduce", tensor, op, _group(group))


def all_gather(tensor: XLATensor, group: Group, dim: int = 0) -> XLATensor:
    """The devices' values along a mesh dim, concatenated along a tensor dim, the same on all of
    them.

    The gradient is a reduce-scatter of the devices' gradients.

    Args:
        tensor: a per-device tensor of any dtype with one dim or more.
        group: along which devices, ``n`` of them: as of `all_reduce`.
        dim: the tensor dim.

    Returns:
        a per-device tensor of the same dtype, ``dim`` being ``n`` times as large, in the order of
        the coordinates; it doesn't vary along the mesh dim.

    Raises:
        UnsupportedOpError: ``tensor`` is no per-device tensor, or has no dims.
        MeshError: no such mesh dim.
        IndexError: ``tensor`` has no such dim.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        x = xd.collectives.axis_index(mesh, "tp").reshape(1, 1)
        assert xd.collectives.all_gather(x, (mesh, "tp"), dim=1).tolist() == [[0, 1, 2, 3]]
    """
    group = _group(group)
    check_tensor("all_gather", tensor)
    moved = tensor.movedim(dim, 0) if tensor.ndim else tensor
    gathered = _native("all_gather_into_tensor", moved, group.size(), group)
    return gathered.movedim(0, dim)


def reduce_scatter(tensor: XLATensor, group: Group, dim: int = 0, op: str = "sum") -> XLATensor:
    """The reduction of the devices' values along a mesh dim, of which each device gets its piece.

    The gradient of a sum is an all-gather of the devices' gradients.

    Args:
        tensor: a per-device tensor with one dim or more.
        group: along which devices, ``n`` of them: as of `all_reduce`.
        dim: the tensor dim that is cut, into ``n`` equal pieces; the device at coordinate ``i``
            gets piece ``i``.
        op: as of `all_reduce`, with its dtypes. A reduce-scatter for sum and avg; the others are an
            all-to-all and a reduction of what has arrived.

    Returns:
        a per-device tensor of the same dtype, ``dim`` being an ``n``-th; it varies along the mesh
        dim.

    Raises:
        UnsupportedOpError: ``tensor`` is no per-device tensor, the dim doesn't divide, or the dtype
            has no such reduction.
        MeshError: no such mesh dim.
        RuntimeError: the gradient of a reduction other than a sum, as in torch.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        piece = xd.collectives.reduce_scatter(torch.arange(8.0, device="xla"), mesh)
        assert piece.shape == (1,) and piece.varying == ("dp",)
        assert [v.item() for v in piece.local_values()] == [8.0 * i for i in range(8)]
    """
    group = _group(group)
    check_tensor("reduce_scatter", tensor)
    moved = tensor.movedim(dim, 0) if tensor.ndim else tensor
    return _native("reduce_scatter_tensor", moved, op, group.size(), group).movedim(0, dim)


def all_to_all(tensor: XLATensor, group: Group) -> XLATensor:
    """Piece ``j`` of device ``i``'s dim 0 becomes piece ``i`` of device ``j``'s.

    The gradient is the same of the devices' gradients.

    Args:
        tensor: a per-device tensor of any dtype, whose dim 0 divides by the number of devices.
        group: along which devices: as of `all_reduce`.

    Returns:
        a per-device tensor of the same shape and dtype, which varies along the mesh dim.

    Raises:
        UnsupportedOpError: ``tensor`` is no per-device tensor, or its dim 0 doesn't divide.
        MeshError: no such mesh dim.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("ep",))
        sent = xd.from_device_values([torch.full((4,), float(i)) for i in range(4)], mesh)
        got = xd.collectives.all_to_all(sent, mesh)
        assert got.local_values()[2].tolist() == [0, 1, 2, 3]  # one piece of each device
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
        at_source = index_in(group.within(grad._form.frame)) == option
        return torch.where(at_source, total, 0), None, None, None


def broadcast(tensor: XLATensor, group: Group, src: int = 0) -> XLATensor:
    """The value of one of the devices along a mesh dim, on all of them.

    An all-reduce of that value and of zeros. The gradient is the sum of the devices' gradients at
    the source, 0 elsewhere.

    Args:
        tensor: a per-device tensor of any shape and dtype.
        group: along which devices: as of `all_reduce`.
        src: the coordinate along the mesh dim of the device whose value it is.

    Returns:
        a per-device tensor of the same shape and dtype, which doesn't vary along the mesh dim.

    Raises:
        UnsupportedOpError: ``tensor`` is no per-device tensor, or no device has that coordinate.
        MeshError: no such mesh dim.

    Example::

        import xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        index = xd.collectives.axis_index(mesh, "tp")
        assert xd.collectives.broadcast(index, (mesh, "tp"), src=3).item() == 3
    """
    check_tensor("broadcast", tensor)
    return _Linear.apply(tensor, "broadcast", _group(group), src)


def permute(tensor: XLATensor, group: Group, src_dst: Sequence[int]) -> XLATensor:
    """The device at coordinate ``i`` along a mesh dim sends its value to ``src_dst[i]``.

    The gradient goes back the same ways.

    Args:
        tensor: a per-device tensor of any shape and dtype.
        group: along which devices: as of `all_reduce`.
        src_dst: a permutation of the coordinates, one per device of the group.

    Returns:
        a per-device tensor of the same shape and dtype; it varies along the mesh dim if ``tensor``
        does.

    Raises:
        UnsupportedOpError: ``tensor`` is no per-device tensor, or ``src_dst`` is no permutation.
        MeshError: no such mesh dim.

    Example::

        import xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("pp",))
        index = xd.collectives.axis_index(mesh)
        got = xd.collectives.permute(index, mesh, [1, 2, 3, 0])  # to the next one
        assert [v.item() for v in got.local_values()] == [3, 0, 1, 2]
    """
    check_tensor("permute", tensor)
    pairs = tuple(enumerate(src_dst))
    return _Linear.apply(tensor, "permute", _group(group), pairs)


def axis_index(mesh: DeviceMesh, dim: int | str = 0) -> XLATensor:
    """The coordinate of each device along a mesh dim.

    Args:
        mesh: an xla mesh.
        dim: the number or the name of one of its dims.

    Returns:
        a per-device tensor of shape [] and dtype int64, which varies along the mesh dim.

    Raises:
        MeshError: no such mesh dim.

    Example::

        import xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        index = xd.collectives.axis_index(mesh, "tp")
        assert index.varying == ("tp",)
        assert [v.item() for v in index.local_values()] == [0, 1, 2, 3, 0, 1, 2, 3]
    """
    return index_in(group_of(mesh, dim))


def index_in(group: MeshGroup) -> XLATensor:
    """The coordinate of each device in its group.

    Args:
        group: the devices along a mesh dim, or all of a mesh.
    """
    frame, axes = group.frame, group.axes
    sizes = [frame.sizes[name] for name in axes]
    varying = union(frame, [axes])
    with jax.enable_x64(True):
        index = jnp.arange(group.size(), dtype=jnp.int64).reshape(sizes)
        index = index.transpose([axes.index(name) for name in varying])
        form = device_form(frame, (), dtype=torch.int64, varying=varying)
        array = executor.current().new_array(
            form, lambda: arrays.put(index, form.sharding), lambda _: index
        )
    return XLATensor(Storage(array, form), form)
