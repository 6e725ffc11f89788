"""The meshes of a pipeline's stages: the devices at each coordinate of a mesh dim."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.errors import MeshDimError, MeshError
from xla_dtensor.mesh import root_mesh
from xla_dtensor.runtime import processes


def stage_meshes(mesh: DeviceMesh, dim: str = "pp") -> list[DeviceMesh]:
    """The devices at each coordinate of the mesh dim ``dim``, as meshes of the other dims.

    What ``mesh["dp", "tp"]`` is to the rank of a torchrun program, its own part of the devices, is
    ``stage_meshes(mesh)[i]`` to the devices at coordinate ``i`` of "pp". They have no devices in
    common, so a tensor on one of them takes no memory on the others' devices.

    Args:
        mesh: a whole mesh, with names.
        dim: the name of the dim along which stages follow one another.

    Returns:
        a list of ``mesh.size(dim)`` meshes, whose dims are the other dims of ``mesh``, in its
        order; if it has no others, of one dim called ``dim`` and of size 1.

    Raises:
        MeshError: ``mesh`` has no names, or was cut from another mesh and leaves out devices of
            it; or there are several processes, where a mesh has to have all devices.
        MeshDimError: it has no dim ``dim``.

    Example::

        import xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        first, second = xd.pipeline.stage_meshes(mesh)
        assert first.mesh_dim_names == ("dp", "tp")
        assert second.mesh.tolist() == [[4, 5], [6, 7]]
    """
    names = mesh.mesh_dim_names
    if not names:
        raise MeshError(f"stage_meshes({mesh!r}): pass mesh_dim_names to init_device_mesh")
    if dim not in names:
        raise MeshDimError(f"{mesh!r} has no mesh dim {dim!r}; its dims are {names}")
    if mesh.size() != root_mesh(mesh).size():
        raise MeshError(
            f"stage_meshes({mesh!r}): it leaves out devices of {root_mesh(mesh)!r}, which would "
            "have no stage; give that one"
        )
    if processes.several():
        raise MeshError(
            f"stage_meshes({mesh!r}): with {processes.count()} processes a mesh has to have the "
            "devices of all, and a stage has some of them; run the pipeline in one process"
        )
    rest = tuple(name for name in names if name != dim) or (dim,)
    parts: list[torch.Tensor] = list(mesh.mesh.unbind(names.index(dim)))
    return [
        DeviceMesh("xla", part.reshape(part.shape or (1,)), mesh_dim_names=rest) for part in parts
    ]
