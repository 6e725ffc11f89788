"""Meshes and tensors as HyperParallel's functions make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import device_mesh as torch_device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.mesh.layout import Layout
from xla_dtensor.movement import factories


def init_device_mesh(
    device_type: str = "xla",
    mesh_shape: Sequence[int] = (),
    *,
    mesh_dim_names: Sequence[str] | None = None,
    rank_list: Sequence[int] | None = None,
    init_backend: bool = True,
) -> DeviceMesh:
    """A mesh of xla devices.

    Args:
        device_type: HyperParallel's name of a kind of device ("npu", "gpu"); JAX knows which there
            are.
        mesh_shape: the number of devices along each mesh dim.
        mesh_dim_names: their names.
        rank_list: the devices, in row-major order; the first ones by default.
        init_backend: HyperParallel's; no effect.

    Raises:
        MeshError: not enough devices, or one twice.

    Example::

        from xla_dtensor.compat.hyper_parallel import init_device_mesh

        mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert mesh.device_type == "xla" and mesh.get_device_num_along_axis("tp") == 2
    """
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    if rank_list is None:
        return torch_device_mesh.init_device_mesh("xla", tuple(mesh_shape), mesh_dim_names=names)
    numbers = torch.tensor(list(rank_list)).reshape(tuple(mesh_shape))
    return DeviceMesh("xla", numbers, mesh_dim_names=names)


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | Layout | None = None,
) -> Any:
    """``distribute_tensor`` that takes a layout, or names, for placements.

    Args:
        tensor: the whole value.
        device_mesh: the mesh.
        placements: one per mesh dim, or a `Layout`, or per tensor dim the names of mesh dims.
    """
    return factories.distribute_tensor(
        tensor, device_mesh, placements_in(placements, device_mesh, tensor.ndim)
    )


def placements_in(given: Any, mesh: DeviceMesh | None, ndim: int) -> Any:
    """The placements that placements, a layout or names are."""
    if isinstance(given, Layout):
        return given.placements
    if mesh is not None and given and not any(isinstance(p, Placement) for p in given):
        return Layout.from_device_mesh(mesh)(*given).placements
    return given
