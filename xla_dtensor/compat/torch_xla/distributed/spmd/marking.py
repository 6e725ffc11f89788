"""Shards tensors in place as torch_xla does: ``mark_sharding``, ``clear_sharding`` and others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base import executor
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.compat.torch_xla.distributed.spmd.specs import (
    PartitionSpec,
    orders_of,
    to_placements,
)
from xla_dtensor.compat.torch_xla.errors import SpmdError
from xla_dtensor.errors import PerDeviceValueError, UnsupportedOpError
from xla_dtensor.mesh.combinable import let_meet
from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.movement.factories import distribute_tensor
from xla_dtensor.movement.local_view import as_sharded
from xla_dtensor.tensors.marked_tensor import MarkedTensor, shard_in_place, unshard_in_place
from xla_dtensor.tensors.of_form import is_ours
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor


def mark_sharding(t: torch.Tensor, mesh: DeviceMesh, partition_spec: PartitionSpec) -> Any:
    """Shard a tensor, in place: what holds it (a module, an optimizer, autograd's graph) holds the
    sharded one then. In a compiled step it asks the layout of XLA.

    Args:
        t: on the xla device. One that is the same on all devices becomes sharded, one that is
            sharded gets another layout.
        mesh: a `Mesh`, or any xla mesh.
        partition_spec: for each dim of ``t`` the mesh axis that shards it, by number or name; None
            for none; a tuple for several, of which the first cuts first.

    Returns:
        ``t``.

    Raises:
        TypeError: ``t`` isn't on the xla device.
        SpmdError: the spec doesn't fit the mesh or the tensor.
        PerDeviceValueError: each device has another value.
        UnsupportedOpError: in a compiled step, of a tensor from outside of it.

    Example::

        import torch
        import xla_dtensor.compat.torch_xla.distributed.spmd as xs

        mesh = xs.Mesh(range(8), (2, 4), ("data", "model"))
        layer = torch.nn.Linear(16, 8).to("xla")
        xs.mark_sharding(layer.weight, mesh, ("model", None))
        assert isinstance(layer.weight, xs.XLAShardedTensor)
        assert layer.weight.local_shards[1].data.shape == (2, 16)
    """
    lay_out(t, mesh, to_placements(mesh, tuple(partition_spec), t.ndim), "mark_sharding")
    return t


def lay_out(t: Any, mesh: DeviceMesh, placements: tuple[Placement, ...], call: str) -> None:
    """Give a tensor a layout, in place."""
    if not is_ours(t):
        raise TypeError(
            f"{call} of a tensor of shape {list(t.shape)} on {t.device}: bring it to the devices "
            "first, t = t.to(xm.xla_device()), or make another one by distribute_tensor"
        )
    let_meet(mesh)
    is_sharded = isinstance(t, XLAShardedTensor)
    if is_sharded and (t.device_mesh, tuple(t.placements)) == (mesh, tuple(placements)):
        return
    if not is_sharded and t.varying:
        raise PerDeviceValueError(
            f"{call}: each device has a value of its own of this tensor of shape "
            f"{list(t.shape)} (along {list(t.varying)}); say how they make up one: "
            "disable_manual_sharding, or DTensor.from_local"
        )
    _check_trace(t, call)
    with torch.no_grad():
        value = t.detach()
        if is_sharded:
            placed = value.redistribute(mesh, placements)
        elif executor.trace() is not None:
            placed = as_sharded(value.clone(), mesh).redistribute(placements=placements)
        else:
            placed = distribute_tensor(value, mesh, placements)
        del value
        _change(t, lambda: shard_in_place(t, placed), placed, call)


def _check_trace(t: Any, call: str) -> None:
    if not executor.current().owns(t._storage_):
        raise UnsupportedOpError(
            f"{call} in a compiled step, of a tensor of shape {list(t.shape)} from outside of it: "
            "it would happen when the step is compiled and in no later call. Call it before the "
            "step, or use the result of mark_sharding_with_gradients in the step"
        )


def _change(t: Any, become: Any, placed: Any, call: str) -> None:
    """Let ``t`` show other memory. What shares the memory that it has doesn't follow, so neither
    may be written from now on."""
    before = t._storage_
    shared = before.is_shared(t) or bool(t._steps)
    become()
    if shared:
        text = (
            f"a tensor of shape {list(t.shape)} shared its memory with another one (a view of it, "
            f"or what it is a view of) when {call} gave it memory of its own, so that a write "
            "would be seen by one of them alone: clone() what is to be written"
        )
        before.refuses_writes = placed._storage_.refuses_writes = text


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Make a tensor whole on every device again, in place.

    Args:
        t: sharded or not.

    Returns:
        ``t``.

    Raises:
        UnsupportedOpError: in a compiled step, of a tensor from outside of it.

    Example::

        import torch
        import xla_dtensor.compat.torch_xla.distributed.spmd as xs

        t = torch.ones(8, 4, device="xla")
        xs.mark_sharding(t, xs.get_1d_mesh(), (0, None))
        xs.clear_sharding(t)
        assert not isinstance(t, xs.XLAShardedTensor)
    """
    tensor: Any = t
    if not isinstance(tensor, XLAShardedTensor):
        return t
    mesh = tensor.device_mesh
    if not isinstance(tensor, MarkedTensor):  # it was made sharded, and can be nothing else
        lay_out(tensor, mesh, (Replicate(),) * mesh.ndim, "clear_sharding")
        return t
    _check_trace(tensor, "clear_sharding")
    with torch.no_grad():
        whole = tensor.detach().clone().full_tensor().clone()
        _change(tensor, lambda: unshard_in_place(tensor, whole), whole, "clear_sharding")
    return t


def mark_sharding_with_gradients(
    t: torch.Tensor, mesh: DeviceMesh, partition_spec: PartitionSpec
) -> Any:
    """A tensor of the same value that is sharded, as its gradient is.

    Args:
        t: on the xla device; stays as it is.
        mesh, partition_spec: as of `mark_sharding`.

    Returns:
        the sharded tensor.

    Raises:
        SpmdError: the spec doesn't fit the mesh or the tensor.

    Example::

        import torch
        import xla_dtensor.compat.torch_xla.distributed.spmd as xs

        x = torch.ones(8, 4, device="xla", requires_grad=True)
        y = xs.mark_sharding_with_gradients(x, xs.get_1d_mesh("data"), ("data", None))
        y.square().sum().backward()
        assert y.partition_spec == (0, None) and x.grad.cpu().eq(2).all()
    """
    placements = to_placements(mesh, tuple(partition_spec), t.ndim)
    let_meet(mesh)
    sharded = as_sharded(t, mesh).redistribute(mesh, placements)
    if sharded.requires_grad:
        wanted = unpartial(placements)
        sharded.register_hook(lambda grad: as_sharded(grad, mesh).redistribute(mesh, wanted))
    return sharded


def shard_as(a: Any, b: Any) -> tuple[Any, Any]:
    """Two trees of tensors in one layout, pair by pair: that of the first one of a pair that is
    sharded. (torch_xla leaves the choice to XLA.)

    Args:
        a, b: tensors, or lists, tuples and dicts of them, of one structure; None stays None.

    Returns:
        both, laid out alike; of one value with what was given.

    Raises:
        SpmdError: they have different structures.

    Example::

        import torch
        import xla_dtensor.compat.torch_xla.distributed.spmd as xs

        x, y = torch.ones(8, 4, device="xla"), torch.zeros(8, 4, device="xla")
        xs.mark_sharding(x, xs.get_1d_mesh(), (0, None))
        x, y = xs.shard_as(x, y)
        assert y.partition_spec == (0, None)
    """
    ones, structure = pytree.tree_flatten(a)
    others, other_structure = pytree.tree_flatten(b)
    pairs = list(zip(ones, others, strict=False))
    if structure != other_structure or any((x is None) != (y is None) for x, y in pairs):
        raise SpmdError(f"shard_as: a and b have other structures: {structure}, {other_structure}")
    done = [_alike(x, y) for x, y in pairs]
    return (
        pytree.tree_unflatten([x for x, _ in done], structure),
        pytree.tree_unflatten([y for _, y in done], structure),
    )


def _alike(x: Any, y: Any) -> tuple[Any, Any]:
    model = next((t for t in (x, y) if isinstance(t, XLAShardedTensor)), None)
    if model is None:
        return x, y
    mesh, placements = model.device_mesh, unpartial(model.placements)
    if len(placements) and any(t.ndim != model.ndim for t in (x, y)):
        raise SpmdError(f"shard_as: shapes {list(x.shape)} and {list(y.shape)} have other ranks")
    one, other = (as_sharded(t, mesh).redistribute(mesh, placements) for t in (x, y))
    return one, other


def wrap_as_sharded_tensor(
    t: torch.Tensor,
    mesh_shape: tuple[int, ...] | None = None,
    partition_spec: PartitionSpec | None = None,
) -> Any:
    """``t`` itself, which is sharded first if a shape and a spec are given.

    Args:
        t: on the xla device.
        mesh_shape: of a mesh of all devices in their order.
        partition_spec: as of `mark_sharding`.
    """
    if mesh_shape is None or partition_spec is None:
        return t
    numbers = torch.arange(int(torch.tensor(mesh_shape).prod())).reshape(tuple(mesh_shape))
    return mark_sharding(t, DeviceMesh("xla", numbers), partition_spec)


def unwrap_sharded_tensor(t: torch.Tensor) -> torch.Tensor:
    """``t`` itself: a sharded tensor is no wrapper here."""
    return t


def wrap_if_sharded(x: Any) -> Any:
    """``x`` itself."""
    return x


@dataclass
class ShardingSpec:
    """A mesh and a partition spec: how tensors are to be sharded that don't exist yet.

    Attributes:
        mesh: the mesh.
        partition_spec: for each dim of the tensors the axes that shard it.
        minibatch: each process loads its own part of a batch, along dim 0.

    Raises:
        SpmdError: the spec doesn't fit the mesh.

    Example::

        import torch
        import xla_dtensor.compat.torch_xla.distributed.spmd as xs

        spec = xs.ShardingSpec(xs.get_1d_mesh("data"), ("data", None))
        assert spec.can_apply(torch.ones(16, 4)) and not spec.can_apply(torch.ones(16))
    """

    mesh: DeviceMesh
    partition_spec: tuple[Any, ...]
    minibatch: bool | None = False

    def __post_init__(self) -> None:
        orders_of(self.mesh, self.partition_spec)

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether it has an entry for each of the tensor's dims."""
        return t.ndim == len(self.partition_spec)

    def placements(self) -> tuple[Placement, ...]:
        """The placements of a tensor that is sharded so."""
        return to_placements(self.mesh, self.partition_spec, len(self.partition_spec))

    def apply(self, t: torch.Tensor) -> None:
        """Shard a tensor so, in place (`mark_sharding`)."""
        mark_sharding(t, self.mesh, self.partition_spec)
