"""Shards the parameters of a model without a plan by their size alone."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from xla_dtensor.base.torch_private.attributes import parameters_of
from xla_dtensor.errors import MeshError
from xla_dtensor.movement.factories import distribute_module, distribute_tensor


def shard_by_size(module: nn.Module, mesh: DeviceMesh, *, least: int = 1024) -> nn.Module:
    """Lay out a whole model without a plan: every large parameter is cut over all dims of ``mesh``,
    each along the longest tensor dim that divides; small parameters and buffers are replicated.

    The model then takes global tensors: ``DTensor``s (a batch with ``Shard(0)`` over the
    data-parallel dims), or plain ones, which count as the same on all devices. Any layout gives
    the same numbers; which is fastest depends on the model, and a plan of ``parallelize_module``
    for it may be faster. Parameters, gradients and optimizer state take ``1 / mesh.size()`` of the
    memory, where they divide.

    Args:
        module: any module; parameters that are ``DTensor``s already stay as they are.
        mesh: an xla mesh of any number of dims.
        least: elements of the smallest parameter that is cut.

    Returns:
        ``module``. Its parameters are new objects; make optimizers after it. Shared parameters stay
        shared.

    Raises:
        MeshError: ``mesh`` is no xla mesh.
        RuntimeError: the module was distributed before.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        model = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 64))
        xd.parallel.shard_by_size(model, mesh)
        assert model[0].weight.placements == (xd.Shard(1), xd.Shard(0))
        assert model[1].bias.placements == (xd.Replicate(), xd.Replicate())
    """
    if getattr(mesh, "device_type", None) != "xla":
        raise MeshError(f"shard_by_size: {mesh!r} is no xla mesh")

    def cut(name: str, inner: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in parameters_of(inner).items():
            if parameter is None or parameter.numel() < least or hasattr(parameter, "placements"):
                continue
            layout = _layout(tuple(parameter.shape), mesh)
            value = distribute_tensor(parameter.detach(), mesh, layout)
            new = nn.Parameter(value, requires_grad=parameter.requires_grad)
            inner.register_parameter(key, new)

    return distribute_module(module, mesh, cut)


def _layout(shape: tuple[int, ...], mesh: DeviceMesh) -> list[Placement]:
    """The largest mesh dim first, along the dim of which most is left on a device."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    left = list(shape)
    for i in sorted(range(mesh.ndim), key=lambda i: -mesh.size(i)):
        size = mesh.size(i)
        dims = [d for d in range(len(left)) if left[d] % size == 0]
        if size > 1 and dims:
            dim = max(dims, key=lambda d: (left[d], left[d] == shape[d]))
            left[dim] //= size
            placements[i] = Shard(dim)
    return placements
