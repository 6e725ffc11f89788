"""What stands for a process group of an xla mesh: the name of one of its dims."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base.cache import Table
from xla_dtensor.errors import MeshDimError, MeshError, PerDeviceValueError
from xla_dtensor.mesh.frame import Frame, frame_of, mesh_dim_axes


class MeshGroup(str):
    """The devices along one dim of an xla mesh, as a group name: torch's functional collectives
    take group names. ``mesh.get_group(dim)`` makes one.

    Attributes:
        mesh, dim: the mesh and the number of its dim.
    """

    mesh: DeviceMesh
    dim: int

    @property
    def group_name(self) -> str:
        """The name itself, as of torch's process groups."""
        return self

    @property
    def axes(self) -> tuple[str, ...]:
        """The frame axes of the mesh dim, major to minor."""
        return mesh_dim_axes(self.mesh)[self.dim]

    @property
    def frame(self) -> Frame:
        """The frame of the mesh."""
        return frame_of(self.mesh)

    def size(self) -> int:
        """The number of devices in each group."""
        return math.prod(self.frame.sizes[name] for name in self.axes)

    def rank(self) -> NoReturn:
        """Differs from device to device, so it raises.

        Raises:
            PerDeviceValueError: always.
        """
        raise PerDeviceValueError(
            f"the rank in group {str(self)!r} differs from device to device, and one process "
            "drives them all: xla_dtensor.axis_index(mesh, dim) has it as a per-device tensor"
        )

    def __getattr__(self, name: str) -> NoReturn:
        # torch.distributed.all_reduce and the like ask a process group for its methods.
        raise AttributeError(
            f"group {str(self)!r} has no {name!r}: it names devices along a dim of an xla mesh and "
            "is no process group. torch.distributed._functional_collectives and "
            "xla_dtensor.movement.collectives take it"
        )


# None goes: torch's functional collectives come with the bare name, which anybody may keep.
_groups: Table[str, MeshGroup] = Table("groups", "found by name at any time", clearable=False)


def group_of(mesh: DeviceMesh, dim: int | str | None = None) -> MeshGroup:
    """The group along ``dim`` (a number, a name, or nothing for a mesh of one dim).

    Raises:
        MeshDimError: the mesh has no such dim.
        MeshError: it has several, and none is named.
    """
    if dim is None:
        if mesh.ndim != 1:
            raise MeshError(
                f"{mesh!r} has {mesh.ndim} dims: say which group is meant, (mesh, dim) or "
                "mesh.get_group(dim)"
            )
        dim = 0
    if isinstance(dim, str):
        names = mesh.mesh_dim_names or ()
        if dim not in names:
            raise MeshDimError(f"{mesh!r} has no mesh dim {dim!r}")
        dim = names.index(dim)
    number = int(dim)
    if not -mesh.ndim <= number < mesh.ndim:
        raise MeshDimError(f"{mesh!r} has no mesh dim {dim}")
    number %= mesh.ndim
    frame = frame_of(mesh)
    axes = mesh_dim_axes(mesh)[number]
    # Other meshes of these devices may have dims of the same names.
    sizes = ",".join(f"{axis}={size}" for axis, size in frame.sizes.items())
    name = f"xla:{','.join(map(str, frame.device_ids))}:{sizes}:{'.'.join(axes)}"
    group = _groups.get(name)
    if group is None:
        group = MeshGroup(name)
        group.mesh, group.dim = mesh, number
        group = _groups.setdefault(name, group)  # by now it has everything
    return group


def resolve_group(group: Any) -> MeshGroup | None:
    """The `MeshGroup` that any of torch's ways to name a group means; None if none of ours."""
    if isinstance(group, MeshGroup):
        return group
    if isinstance(group, DeviceMesh) and group.device_type == "xla":
        return group_of(group)
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        return group_of(*group) if group[0].device_type == "xla" else None
    return _groups.get(group) if isinstance(group, str) else None
