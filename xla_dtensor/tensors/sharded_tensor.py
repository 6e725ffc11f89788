"""`XLAShardedTensor`: the global view, one logical tensor laid out over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.mesh.layout import Layout, layout_of
from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.tensors.backend import backend
from xla_dtensor.tensors.base import TensorMethods


@dataclass(frozen=True)
class LocalShard:
    """One device's part of a sharded tensor.

    Attributes:
        device: number of the device in the mesh.
        index: the slice of the logical tensor that it holds, per tensor dim.
        data: the values there, as a CPU tensor (a copy).
    """

    device: int
    index: tuple[slice, ...]
    data: torch.Tensor


class XLAShardedTensor(TensorMethods, DTensor):
    """A ``DTensor`` on an xla mesh: ``shape`` is the global shape, operations have single-device
    semantics, and XLA inserts the communication that the placements call for.

    Made by ``distribute_tensor``, the factories of ``torch.distributed.tensor`` and operations on
    sharded tensors; not by calling the class.
    """

    _local: Any = None  # what to_local() returned last, see movement/local_view.py

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        varying = self._form.varying
        more = f", varying along {', '.join(varying)}" if varying else ""
        if self.requires_grad:
            more += ", requires_grad=True"
        return (
            f"XLAShardedTensor(shape={list(self.shape)}, dtype={self.dtype}, "
            f"device_mesh={self.device_mesh!r}, placements={self.placements}{more})"
        )

    def _has_become(self) -> None:
        self._local = None  # another part of the same memory may have the same version
        if self._own_form.spec is not None:
            self._spec = self._own_form.spec
            keep_leaf_gradients_sharded(self)

    def _copy(self) -> Any:
        return self.detach().redistribute(placements=self.placements)

    def requires_grad_(self, requires_grad: bool = True) -> XLAShardedTensor:
        """Start or stop recording; gradients that reach a leaf take on its shardings."""
        super().requires_grad_(requires_grad)
        if requires_grad:
            keep_leaf_gradients_sharded(self)
        return self

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> XLAShardedTensor:
        """This tensor on ``device_mesh`` (default: its own) with ``placements``; differentiable.

        XLA chooses the collectives and schedules them, so ``async_op`` makes no difference. The
        meshes may have different devices. ``forward_dtype`` is the dtype of the communication and
        the result, ``backward_dtype`` that of the gradient's communication; the gradient comes back
        in the input's dtype, with the input's placements (``Partial`` as ``Replicate``).

        Raises:
            RuntimeError: no placements given, or ``Partial`` asked for where it isn't already.
            PlacementError: the placements don't fit the mesh or the tensor.
        """
        return backend().redistribute(self, device_mesh, placements, forward_dtype, backward_dtype)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole logical tensor as an `XLATensor`, the same on every device; differentiable.

        Args:
            grad_placements: placements of the gradient that flows back (default: replicated).
        """
        return backend().full_tensor(self, grad_placements)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """What each device holds, as an `XLATensor` that varies along the mesh dims that shard
        (or hold parts of) this tensor; differentiable. It shares this tensor's memory. The same
        object until this tensor is written to.

        Args:
            grad_placements: how the devices' gradients make up this tensor's gradient; by default
                as its placements say, with ``Replicate`` for ``Partial``.

        Raises:
            UnsupportedOpError: a sharded dim doesn't divide.
        """
        return backend().to_local(self, grad_placements)

    def reduce_partial(self) -> XLAShardedTensor:
        """This tensor with pending reductions done: ``Partial`` mesh dims replicated; itself if
        there are none. Differentiable."""
        placements = list(unpartial(self.placements))
        if list(self.placements) == placements:
            return self
        return self.redistribute(placements=placements)

    @property
    def layout(self) -> Layout:
        """How it is laid out over its mesh (not ``torch.strided``, which a plain tensor has)."""
        return layout_of(self.device_mesh, self.placements, self.ndim)

    @property
    def local_shards(self) -> list[LocalShard]:
        """What each device holds of the logical tensor, in the order of the mesh's devices.

        ``Partial`` values whose reduction is pending are reduced first.
        """
        return backend().local_shards(self)

    def __tensor_flatten__(self) -> Any:
        raise NotImplementedError(
            "torch.compile doesn't take an XLAShardedTensor apart; compile the step with "
            "xla_dtensor.compile"
        )


def keep_leaf_gradients_sharded(leaf: XLAShardedTensor) -> None:
    """Let gradients that reach ``leaf`` land in its layout (``Partial`` mesh dims replicated).

    By its operation's rule a gradient may be ``Partial`` or replicated where the leaf is sharded:
    each device would hold all of it.
    """
    if not leaf.is_leaf or not leaf.requires_grad:
        return
    handle = getattr(leaf, "_landing", None)
    if handle is not None:
        if handle.layout == (leaf.device_mesh, leaf.placements):
            return
        handle.remove()  # the leaf's layout has changed since (leaf.data = ...)
    mesh = leaf.device_mesh
    wanted = unpartial(leaf.placements)

    def land(grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:  # undefined: a formula of torch's gave no gradient
            return None
        if not isinstance(grad, XLAShardedTensor):  # it came through .cpu()
            grad = backend().as_sharded(grad, mesh)
        elif grad.device_mesh == mesh and grad.placements == wanted:
            return None
        return grad.redistribute(mesh, wanted)

    leaf._landing = leaf.register_hook(land)
    leaf._landing.layout = mesh, leaf.placements
