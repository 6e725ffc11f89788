"""`MeshGroup`: devices along a mesh dim, in place of the process group that an xla mesh hasn't."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor import runtime
from xla_dtensor.base.tables.cache import Table
from xla_dtensor.base.torch_private.attributes import device_numbers, flattened_meshes, root_mesh
from xla_dtensor.errors import MeshDimError, MeshError, PerDeviceValueError
from xla_dtensor.mesh.frame import Frame, frame_of, mesh_dim_axes
from xla_dtensor.runtime import processes


class MeshGroup(str):
    """The devices along one dim of an xla mesh, as a group name: torch's functional collectives
    take group names. ``mesh.get_group(dim)`` makes one.

    Attributes:
        mesh, dim: the mesh and the number of its dim.
        device_type: as of a mesh.
    """

    mesh: DeviceMesh
    dim: int
    device_type = "xla"

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

    def within(self, frame: Frame | None) -> MeshGroup:
        """The group, for a tensor of ``frame`` (None: of no mesh yet)."""
        return self

    def devices(self) -> tuple[int, ...] | None:
        """The numbers of the devices in the order of the group, if there is one group of all; None
        if each device is in one of several groups."""
        frame, axes = self.frame, self.axes
        if math.prod(frame.sizes.values()) != self.size():
            return None
        ids = np.array(frame.device_ids).reshape([axis.size for axis in frame.axes])
        names = [axis.name for axis in frame.axes]
        rest = [name for name in names if name not in axes]  # of size 1
        return tuple(ids.transpose([names.index(name) for name in (*axes, *rest)]).ravel().tolist())

    def own_ranks(self) -> tuple[int, ...]:
        """The ranks in their groups of this process's devices."""
        frame, axes = self.frame, self.axes
        sizes = [axis.size for axis in frame.axes]
        names = [axis.name for axis in frame.axes]
        places = np.indices(sizes)
        ranks = np.zeros(sizes, int)
        for name in axes:
            ranks = ranks * frame.sizes[name] + places[names.index(name)]
        own = np.isin(np.array(frame.device_ids).reshape(sizes), list(frame.own_ids))
        return tuple(sorted(set(ranks[own].tolist())))

    def rank(self) -> int:
        """The rank of this process's devices, if they have the same: those of a process that is
        alone, or that drives several along the mesh dim, have not.

        Raises:
            PerDeviceValueError: they haven't.
        """
        found = self.own_ranks() if processes.several() else ()
        if len(found) == 1:
            return found[0]
        raise PerDeviceValueError(
            f"the rank in group {str(self)!r} differs from device to device, and one process "
            f"drives {'several' if processes.several() else 'them all'}: "
            "xla_dtensor.collectives.axis_index(mesh, dim) has it as a per-device tensor"
        )

    def __getattr__(self, name: str) -> NoReturn:
        # torch.distributed.all_reduce and the like ask a process group for its methods.
        raise AttributeError(
            f"group {str(self)!r} has no {name!r}: it names devices along a dim of an xla mesh and "
            "is no process group. torch.distributed's collectives on per-device tensors, "
            "torch.distributed._functional_collectives and xla_dtensor.collectives take it"
        )


class WholeGroup(MeshGroup):
    """All devices of a root mesh, as one group in the order of the mesh."""

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.frame.axes if axis.size > 1)


class World(WholeGroup):
    """The default group of ``torch.distributed.init_process_group("xla")``: all devices, of
    whichever mesh a tensor lies on.

    It starts JAX when it is first asked, since before the first mesh the number of simulated
    devices is open.
    """

    is_world = True
    devices_in_all: int | None = None
    """The number of devices, if the user gave one."""
    _mesh: DeviceMesh | None = None
    dim = 0

    @property
    def mesh(self) -> DeviceMesh:
        if self.devices_in_all is None:
            runtime.start()
            self.devices_in_all = runtime.device_count()
        if self._mesh is None:
            self._mesh = DeviceMesh("xla", list(range(self.devices_in_all)))
        return self._mesh

    def within(self, frame: Frame | None) -> MeshGroup:
        own = self.frame
        if frame is None or frame is own:
            return self
        if frame.device_ids != own.device_ids:
            raise MeshError(
                f"the default group has the devices {list(own.device_ids)}, the tensor lies on "
                f"{list(frame.device_ids)} of {frame.root!r}: give the group, "
                "group=mesh.get_group(dim) for the devices along a dim of its mesh"
            )
        return whole_group_of(frame.root)


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
        flattened = flattened_meshes(root_mesh(mesh))
        if dim not in names and dim in flattened:
            return group_of(flattened[dim])
        if dim not in names:
            raise MeshDimError(
                f"{mesh!r} has no mesh dim {dim!r}; its dims are {names}"
                + (f", flattened ones {tuple(flattened)}" if flattened else "")
            )
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


def whole_group_of(mesh: DeviceMesh) -> WholeGroup:
    """The group of all devices of the root of ``mesh``."""
    root = root_mesh(mesh)
    sizes = ",".join(map(str, root.shape))
    name = (
        f"xla:{','.join(map(str, device_numbers(root).tolist()))}:{sizes}:{root.mesh_dim_names}:all"
    )
    group = _groups.get(name)
    if group is None:
        group = WholeGroup(name)
        group.mesh, group.dim = root, 0
        group = _groups.setdefault(name, group)
    assert isinstance(group, WholeGroup)
    return group


def world(count: int | None = None) -> World:
    """The default group, of ``count`` devices; by default of all that JAX has."""
    group = World("xla:world")
    group.devices_in_all = count
    _groups["xla:world"] = group
    return group


def mesh_along(group: MeshGroup) -> DeviceMesh:
    """The mesh of one dim whose devices are those of ``group``.

    Raises:
        MeshError: it is a dim of a mesh without names, which can't be sliced.
    """
    mesh = group.mesh
    if mesh.ndim == 1:
        return mesh
    if isinstance(group, WholeGroup):
        raise MeshError(f"{mesh!r} has {mesh.ndim} dims: give the mesh of one of them, mesh[name]")
    if not mesh.mesh_dim_names:
        raise MeshError(
            f"{mesh!r} can't be sliced along its dim {group.dim}: pass mesh_dim_names to "
            "init_device_mesh, and mesh[name] here"
        )
    return mesh[mesh.mesh_dim_names[group.dim]]


def resolve_group(group: Any) -> MeshGroup | None:
    """The `MeshGroup` that any of torch's ways to name a group means; None if none of ours."""
    if isinstance(group, MeshGroup):
        return group
    if isinstance(group, DeviceMesh) and group.device_type == "xla":
        return group_of(group)
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        return group_of(*group) if group[0].device_type == "xla" else None
    return _groups.get(group) if isinstance(group, str) else None
