"""Which devices run data-parallel: the meaning of ``mesh`` and ``dp_mesh_dims``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Placement, Replicate

from xla_dtensor import runtime
from xla_dtensor.base.torch_private import concatenate_meshes
from xla_dtensor.base.torch_private.attributes import flatten
from xla_dtensor.errors import MeshError
from xla_dtensor.mesh import current_mesh, mesh_dim_axes
from xla_dtensor.mesh.placements import shard_after

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims

Placements = tuple[Placement, ...]


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

    def sharded_layout(
        self, mesh: DeviceMesh, placements: Placements, dim: int
    ) -> tuple[DeviceMesh, Placements]:
        """As torch lays out, in shards, what is replicated over the data-parallel dims of the
        whole mesh.

        Args:
            mesh, placements: before.
            dim: the tensor dim to shard.

        Raises:
            ValueError: as torch: another mesh, or not replicated.
        """
        if mesh != self.whole_mesh:
            raise ValueError(
                "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got "
                "different mesh objects"
            )
        names = mesh.mesh_dim_names
        assert names is not None and self.dims is not None
        for kind, group in (
            ("shard", self.dims.shard_names),
            ("replicate", self.dims.replicate_names),
        ):
            for name in group:
                i = names.index(name)
                if not isinstance(placements[i], Replicate):
                    raise ValueError(
                        f"Expected Replicate() on DP {kind} dim '{name}' (index {i}) but got "
                        f"{placements[i]}"
                    )
        shards = [names.index(name) for name in self.dims.shard_names]
        if len(shards) == 1:
            new = list(placements)
            new[shards[0]] = shard_after(dim, mesh, placements, shards[0] + 1)
            return mesh, tuple(new)
        # Several mesh dims that shard are one in the parameter's mesh.
        meshes: list[DeviceMesh] = []
        result: list[Placement] = []
        for i, name in enumerate(names):
            if i == shards[0]:
                meshes.append(self.mesh)
                result += [Replicate()] * (self.mesh.ndim - 1)
                result.append(shard_after(dim, mesh, placements, i + 1))
            elif name not in (*self.dims.shard_names, *self.dims.replicate_names):
                meshes.append(mesh[name])
                result.append(placements[i])
        return concatenate_meshes(meshes), tuple(result)


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
