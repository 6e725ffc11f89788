"""`XLAShardedTensor`: the global view, one logical tensor laid out over a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base import executor
from xla_dtensor.base.torch_private import is_in_forward_ad
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form
from xla_dtensor.mesh.layout import Layout, layout_of
from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.tensors.backend import backend
from xla_dtensor.tensors.base import TensorMethods
from xla_dtensor.tensors.device_tensor import not_in_a_body
from xla_dtensor.tensors.printing import text_of


@dataclass
class LocalShard:
    """One device's part of a sharded tensor.

    Attributes:
        device: number of the device in the mesh.
        index: the slice of the logical tensor that it holds, per tensor dim.
        data: the values there, as a CPU tensor (a copy).
        replica: how many of the devices before it hold the same part.
    """

    device: int
    index: tuple[slice, ...]
    data: torch.Tensor
    replica: int = 0


STAND_INS: set[type] = set()
"""Classes of tensors that are sharded and can't be a ``DTensor`` (`tensors/marked_tensor.py`)."""


class _KnowsStandIns(type(torch.Tensor)):  # type: ignore[misc]
    """For ``isinstance(x, XLAShardedTensor)``, by which the package asks whether ``x`` is
    sharded."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or type(instance) in STAND_INS


class XLAShardedTensor(TensorMethods, DTensor, metaclass=_KnowsStandIns):
    """A ``DTensor`` on an xla mesh: ``shape`` is the global shape, operations have single-device
    semantics, and XLA inserts the communication that the placements call for.

    Made by ``distribute_tensor``, ``DTensor.from_local``, the factories of
    ``torch.distributed.tensor`` and operations on sharded tensors; not by calling the class.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        x = xd.distribute_tensor(torch.ones(8, 16), mesh, [xd.Shard(0), xd.Replicate()])
        w = xd.distribute_tensor(torch.ones(16, 32), mesh, [xd.Replicate(), xd.Shard(1)])
        y = x @ w
        assert isinstance(y, xd.XLAShardedTensor) and y.shape == (8, 32)
        assert y.placements == (xd.Shard(0), xd.Shard(1)) and y.sum().item() == 8 * 32 * 16
    """

    __module__ = "torch.xla"  # as `XLATensor` has it

    _xla_local: Any = None  # what to_local() returned last, see movement/local_view.py
    _summed: tuple[int, ...] = ()  # mesh dims over which devices' gradients are added up later

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        where = [f"device_mesh={self.device_mesh!r}", f"placements={self.placements}"]
        return text_of(self, type(self).__name__, where)

    def _has_become(self) -> None:
        self._xla_local = None  # another part of the same memory may have the same version
        if self._own_form.spec is not None:
            self._spec = self._own_form.spec
            keep_leaf_gradients_sharded(self)

    def _copy(self) -> Any:
        return self.detach().redistribute(placements=self.placements)

    def requires_grad_(self, requires_grad: bool = True) -> XLAShardedTensor:
        """Start or stop recording; gradients that reach a leaf take on its shardings.

        Args:
            requires_grad: whether to record.

        Returns:
            the tensor itself.

        Raises:
            RuntimeError: as in torch: an integer tensor, or False for one that is no leaf.

        Example::

            import torch, xla_dtensor as xd

            mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
            x = xd.distribute_tensor(torch.ones(8), mesh, [xd.Shard(0)]).requires_grad_()
            x.sum().backward()
            assert x.grad.placements == (xd.Shard(0),)
        """
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
        """This tensor in another layout; differentiable. As ``DTensor.redistribute``.

        The meshes may have different devices. The gradient comes back in the input's dtype, with
        the input's placements (``Partial`` as ``Replicate``).

        Args:
            device_mesh: the mesh of the result; by default the tensor's own.
            placements: one per mesh dim.
            async_op: makes no difference: XLA chooses the collectives and schedules them.
            forward_dtype: the dtype of the communication and of the result; by default the
                tensor's.
            backward_dtype: the dtype of the gradient's communication.

        Returns:
            an `XLAShardedTensor` of the same shape and value, in ``forward_dtype``, with
            ``placements`` on ``device_mesh``.

        Raises:
            RuntimeError: no placements given.
            UnsupportedOpError: in a branch or the body of a loop of a compiled step, of a tensor
                from outside of that.
            PlacementError: the placements don't fit the mesh or the tensor, or ``Partial`` is asked
                for where it isn't already.
            MeshMismatchError: ``device_mesh`` is no xla mesh.

        Example::

            import torch, xla_dtensor as xd

            mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            x = xd.distribute_tensor(torch.randn(8, 16), mesh, [xd.Shard(0), xd.Replicate()])
            y = x.redistribute(placements=[xd.Replicate(), xd.Shard(1)])
            assert y.placements == (xd.Replicate(), xd.Shard(1))
            assert torch.equal(y.full_tensor().cpu(), x.full_tensor().cpu())
        """
        _check_place(self, "redistribute")
        return backend().redistribute(self, device_mesh, placements, forward_dtype, backward_dtype)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole logical tensor, the same on every device; differentiable. As
        ``DTensor.full_tensor``.

        Args:
            grad_placements: placements of the gradient that flows back, ``Replicate`` or
                ``Partial`` per mesh dim; by default replicated.

        Returns:
            an `XLATensor` of the same shape and dtype that doesn't vary.

        Raises:
            UnsupportedOpError: ``grad_placements`` has a ``Shard``; or see `redistribute`.
            PlacementError: ``grad_placements`` doesn't fit the mesh.

        Example::

            import torch, xla_dtensor as xd

            mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
            x = xd.distribute_tensor(torch.arange(8), mesh, [xd.Shard(0)])
            assert x.full_tensor().cpu().tolist() == list(range(8))
        """
        _check_place(self, "full_tensor")
        return backend().full_tensor(self, grad_placements)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """What each device holds; differentiable. As ``DTensor.to_local``, for all devices at once.

        It shares this tensor's memory, and is the same object until this tensor is written to.

        Of a ``Partial`` that an operation has made (``x.sum()`` of a sharded tensor) the parts add
        up to what torch's parts add up to, but they are others: the first device along the mesh dim
        has all of it, and the rest have zeros. For each device's own part compute with
        ``x.to_local()``.

        Args:
            grad_placements: how the devices' gradients make up this tensor's gradient; by default
                as its placements say, with ``Replicate`` for ``Partial``.

        Returns:
            an `XLATensor` of the shape of one device's piece and the same dtype. It varies along
            the mesh dims that shard (or hold parts of) this tensor.

        Raises:
            UnsupportedOpError: a sharded dim doesn't divide; or see `redistribute`.
            PlacementError: ``grad_placements`` doesn't fit the mesh or the tensor.

        Example::

            import torch, xla_dtensor as xd

            mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            x = xd.distribute_tensor(torch.randn(8, 16), mesh, [xd.Shard(0), xd.Replicate()])
            local = x.to_local()
            assert local.shape == (4, 16) and local.varying == ("dp",)
        """
        _check_place(self, "to_local")
        return backend().to_local(self, grad_placements)

    def reduce_partial(self) -> XLAShardedTensor:
        """This tensor with pending reductions done; differentiable.

        Returns:
            an `XLAShardedTensor` with ``Replicate`` for ``Partial``; the tensor itself if there is
            none.

        Example::

            import torch, xla_dtensor as xd

            mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
            total = xd.distribute_tensor(torch.ones(8), mesh, [xd.Shard(0)]).sum()
            assert total.placements == (xd.Partial(),)
            assert total.reduce_partial().placements == (xd.Replicate(),)
        """
        placements = list(unpartial(self.placements))
        if list(self.placements) == placements:
            return self
        return self.redistribute(placements=placements)

    @property
    def layout(self) -> Layout:
        """How it is laid out over its mesh, a `Layout`, which equals ``torch.strided`` as well.

        Example::

            import torch, xla_dtensor as xd

            mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
            x = xd.distribute_tensor(torch.ones(8, 4), mesh, [xd.Shard(0)])
            assert x.layout == xd.Layout.from_device_mesh(mesh)("dp", "None")
            assert x.layout == torch.strided and x.layout not in {torch.sparse_coo}
        """
        return layout_of(self.device_mesh, self.placements, self.ndim)

    @property
    def local_shards(self) -> list[LocalShard]:
        """What each device holds of the logical tensor, cut as torch cuts it, in the order of the
        mesh's devices: of each its number (``device``), a slice per tensor dim (``index``), a CPU
        copy of the values (``data``), and how many of the devices before it hold the same
        (``replica``). ``Partial`` values whose reduction is pending are reduced first.

        Raises:
            DataDependentError: in a compiled step.

        Example::

            import torch, xla_dtensor as xd

            mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
            x = xd.distribute_tensor(torch.arange(16), mesh, [xd.Shard(0)])
            shard = x.local_shards[3]
            assert shard.device == 3 and shard.index == (slice(6, 8),)
            assert shard.data.tolist() == [6, 7]
        """
        shards = backend().local_shards(self)
        seen: Counter[Any] = Counter()
        for shard in shards:
            part = tuple((each.start, each.stop) for each in shard.index)  # slices have no hash
            if all(start < stop for start, stop in part):
                shard.replica = seen[part]
                seen[part] += 1
        return shards

    def __tensor_flatten__(self) -> Any:
        raise NotImplementedError(
            "torch.compile and torch.export don't take an XLAShardedTensor apart: XLA is the "
            "compiler of xla tensors, by xla_dtensor.compile(function); export the module on the "
            "CPU, module.cpu()"
        )


def keep_leaf_gradients_sharded(leaf: XLAShardedTensor) -> None:
    """Let gradients that reach ``leaf`` land in its layout (``Partial`` mesh dims replicated).

    By its operation's rule a gradient may be ``Partial`` or replicated where the leaf is sharded:
    each device would hold all of it.
    """
    if not leaf.is_leaf or not leaf.requires_grad:
        return
    handle = getattr(leaf, "_xla_grad_hook", None)
    if handle is not None:
        if handle.layout == (leaf.device_mesh, leaf.placements):
            return
        handle.remove()  # the leaf's layout has changed since (leaf.data = ...)
    mesh = leaf.device_mesh
    wanted = unpartial(leaf.placements)
    targets: dict[Form, Form] = {}  # of the gradients that came so far

    def land(grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:  # undefined: a formula of torch's gave no gradient
            return None
        if not isinstance(grad, XLAShardedTensor):  # it came through .cpu()
            grad = backend().as_sharded(grad, mesh)
        elif grad.device_mesh == mesh and grad.placements == wanted:
            return None
        # With create_graph=True, and under forward-mode AD, the move is differentiated, too.
        if torch.is_grad_enabled() or is_in_forward_ad():
            return grad.redistribute(mesh, wanted)
        # Without a history: of each parameter, so what `redistribute` finds out is remembered.
        source = grad._form
        target = targets.get(source)
        if target is None or not (target.frame and target.frame.is_current):
            target = targets[source] = source.with_placements(mesh, wanted)
        return backend().to_form(grad, target)

    leaf._xla_grad_hook = leaf.register_hook(land)
    leaf._xla_grad_hook.layout = mesh, leaf.placements


def _check_place(tensor: Any, name: str) -> None:
    """Raise where the tensors of functions are whole, and this is one from outside of them."""
    current = executor.current()
    if current.in_body and not current.owns(tensor._storage_):
        raise UnsupportedOpError(not_in_a_body(f"{name}()"))


DTENSORS = (DTensor, XLAShardedTensor)
"""For ``isinstance``: torch's, and ours, whose stand-ins aren't torch's by their class."""
