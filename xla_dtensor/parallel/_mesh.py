"""Which devices run data-parallel: the meaning of ``mesh`` and ``dp_mesh_dims``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from xla_dtensor import runtime
from xla_dtensor.base.torch_private import concatenate_meshes
from xla_dtensor.base.torch_private.attributes import flatten
from xla_dtensor.errors import MeshError
from xla_dtensor.mesh import current_mesh, mesh_dim_axes

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims


@dataclass(frozen=True)
class DataParallel:
    """A mesh of data-parallel devices.

    Attributes:
        mesh: of one or two dims.
        shard_dim: the mesh dim that shards parameters; None under `replicate`.
        replicate_dim: the mesh dim that replicates them; None without one.
        whole_mesh: with ``dp_mesh_dims``, the mesh that these dims are named in.
        dims: ``dp_mesh_dims``.
    """

    mesh: DeviceMesh
    shard_dim: int | None
    replicate_dim: int | None
    whole_mesh: DeviceMesh | None = None
    dims: Any = None

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The frame axes that shard, major to minor."""
        return () if self.shard_dim is None else mesh_dim_axes(self.mesh)[self.shard_dim]

    @property
    def axes(self) -> tuple[str, ...]:
        """All frame axes of the mesh."""
        return tuple(name for names in mesh_dim_axes(self.mesh) for name in names)

    @property
    def numbers_in_whole_mesh(self) -> tuple[int, ...]:
        """The numbers of the data-parallel dims of `whole_mesh`."""
        if self.whole_mesh is None:
            return ()
        own = {*self.dims.shard_names, *self.dims.replicate_names}
        return tuple(i for i, name in enumerate(self.whole_mesh.mesh_dim_names) if name in own)

    @property
    def size(self) -> int:
        """The number of data-parallel devices."""
        return self.mesh.size()


def data_parallel(
    mesh: DeviceMesh | None, dims: DataParallelMeshDims | None, call: str, *, shard: bool
) -> DataParallel:
    """What ``mesh`` and ``dp_mesh_dims`` mean.

    Args:
        call: the user's call, for messages.
        shard: whether it shards: a mesh of two dims then shards over the second.

    Raises:
        MeshError: no mesh is given and none is current, or it isn't an xla mesh.
        ValueError: as torch, for a number of mesh dims or for names that don't fit.
    """
    mesh = mesh or _default_mesh(call)
    if getattr(mesh, "device_type", None) != "xla":
        raise MeshError(f"{call}: {mesh!r} is not an xla mesh; use torch's own {call} there")
    if dims is not None:
        return _named(mesh, dims, call, shard=shard)
    if not shard:
        if mesh.ndim != 1:
            raise ValueError(f"{call} expects a 1D DeviceMesh but got {mesh}")
        return DataParallel(mesh, None, 0)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"{call} expects a 1D or 2D DeviceMesh but got {mesh}")
    return DataParallel(mesh, 0, None) if mesh.ndim == 1 else DataParallel(mesh, 1, 0)


def _default_mesh(call: str) -> DeviceMesh:
    """The current mesh (``with mesh:``, `set_mesh`), else one of all devices."""
    return current_mesh() or init_device_mesh("xla", (runtime.device_count(),))


def _named(mesh: DeviceMesh, dims: DataParallelMeshDims, call: str, *, shard: bool) -> DataParallel:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ValueError(
                f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}"
            )
    if not shard and dims.shard_names:
        raise ValueError(
            f"{call}() with dp_mesh_dims requires replicate-only dims (no shard dims). Use "
            "fully_shard() for sharding."
        )

    def flat(group: tuple[str, ...]) -> DeviceMesh:
        return mesh[group[0]] if len(group) == 1 else flatten(mesh[group], "_".join(group))

    if not dims.shard_names:
        return DataParallel(flat(dims.replicate_names), None, 0, mesh, dims)
    if not dims.replicate_names:
        return DataParallel(flat(dims.shard_names), 0, None, mesh, dims)
    both = concatenate_meshes([flat(dims.replicate_names), flat(dims.shard_names)])
    return DataParallel(both, 1, 0, mesh, dims)
