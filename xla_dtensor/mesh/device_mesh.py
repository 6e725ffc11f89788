"""``DeviceMesh`` for "xla": one process that drives all devices of the mesh.

torch makes no process groups for ``DeviceMesh("xla", ...)`` and leaves out the state that slicing
needs. This subclass supplies it; ``integration`` makes ``DeviceMesh("xla", ...)`` create it. Layout
algebra (slices, ``_flatten``, ``_unflatten``, ``_concatenate``), equality and hashing stay torch's.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor import runtime
from xla_dtensor.base.torch_private import concatenate_meshes
from xla_dtensor.base.torch_private.attributes import (
    cut_from,
    device_numbers,
    device_numbers_of_layout,
    flattened_meshes,
    layout_sizes,
)
from xla_dtensor.errors import MeshDimError, MeshError, PerDeviceValueError
from xla_dtensor.mesh import device_order
from xla_dtensor.mesh.domains import warn_of_crossing
from xla_dtensor.mesh.frame import frame_of
from xla_dtensor.mesh.group import group_of
from xla_dtensor.mesh.saving import reduce_mesh
from xla_dtensor.runtime import abstract, processes


class XLADeviceMesh(DeviceMesh):
    """What torch's ``DeviceMesh`` is over XLA devices; ``init_device_mesh("xla", ...)`` and
    ``DeviceMesh("xla", ...)`` make it. The numbers in ``mesh`` are positions in ``jax.devices()``.
    ``init_device_mesh`` takes a TPU's chips in an order in which neighbours in the mesh are linked,
    and lays the outermost dims across slices, or across GPUs' hosts; the order that is given to
    ``DeviceMesh`` is obeyed.

    A process drives many devices, so what torch defines per rank (``get_rank``,
    ``get_local_rank``, ``get_coordinate``) has no value here and raises ``PerDeviceValueError``,
    unless it is the same for all of the process's devices: with several processes of one device
    each it is as in torch.

    Args:
        device_type: "xla".
        mesh: the device numbers, a tensor or nested lists of any number of dims.
        kwargs: torch's; ``mesh_dim_names`` is the one for users.

    Raises:
        MeshError: no devices, or a number that occurs twice.
        DeviceCountError: more devices than the XLA backend has.

    Example::

        import xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        assert isinstance(mesh, xd.XLADeviceMesh) and mesh["tp"].shape == (4,)
        assert mesh["tp", "dp"].mesh.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    """

    # torch's slicing and concatenation carry group names along; an xla mesh has no process groups.
    _dim_group_names: ClassVar[list[str]] = []

    def __init__(self, device_type: str, mesh: Any = None, **kwargs: Any) -> None:
        numbers = kwargs.get("_rank_map") if mesh is None else torch.as_tensor(mesh, device="cpu")
        if numbers is not None and numbers.numel() == 0:
            raise MeshError(
                "DeviceMesh('xla', ...): the mesh has no devices; every mesh dim needs a size of 1 "
                "or more"
            )
        root = kwargs.get("_root_mesh")
        self._topology = abstract.current() if root is None else root._topology
        if mesh is None and root is None and numbers is not None:
            kwargs["_rank_map"] = _near(kwargs.get("_layout"), numbers)
        super().__init__(device_type, mesh, **kwargs)
        if cut_from(self) is None:
            ids = device_numbers(self).tolist()
            if len(set(ids)) != len(ids) or min(ids) < 0:
                raise MeshError(
                    f"DeviceMesh('xla', {ids}): device numbers must be distinct and not negative; "
                    "they are positions in jax.devices()"
                )
            devices = runtime.devices(ids)  # starts the backend, or says what is missing
            if processes.several() and len(ids) != runtime.device_count():
                raise MeshError(
                    f"DeviceMesh('xla', {ids}): {processes.count()} processes have "
                    f"{runtime.device_count()} devices together, and a mesh has to have all of "
                    "them; cut it from one that has, mesh[name]"
                )
            warn_of_crossing(self.mesh_dim_names or (), self.shape, devices)

    @staticmethod
    def _init_process_groups(*args: Any, **kwargs: Any) -> list[str]:
        return []

    @property
    def mesh(self) -> torch.Tensor:
        """The device numbers, of shape ``self.shape``: of a submesh, those at coordinate 0 of the
        root dims that it leaves out."""
        return device_numbers_of_layout(self)[0]

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """The submesh of these dims, in the order given.

        Raises:
            MeshError: the mesh has no dim names.
            MeshDimError: it has no dim of that name.
        """
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        own = self.mesh_dim_names
        if not own:
            raise MeshError(
                f"cannot slice {self!r} by {names}: it has no mesh_dim_names; pass them to "
                "init_device_mesh"
            )
        flattened = flattened_meshes(self) if cut_from(self) is None else {}
        for name in names:
            if name not in own and name not in flattened:
                raise MeshDimError(
                    f"{self!r} has no mesh dim {name!r}; its dims are {own}"
                    + (f", flattened ones {tuple(flattened)}" if flattened else "")
                )
        if len(names) == 1:
            return flattened[names[0]] if names[0] in flattened else super().__getitem__(names)
        if len(set(names)) != len(names):
            raise MeshDimError(f"{self!r}[{names}]: name each mesh dim once")
        if not names:
            raise MeshDimError(f"{self!r}[()]: name one or more of its dims {own}")
        if names == own:
            return self
        # torch's own slicing wants ascending order; concatenating slices gives any order.
        return concatenate_meshes([self[name] for name in names])

    def _unflatten(self, dim: int | str, *args: Any, **kwargs: Any) -> DeviceMesh:
        """torch's, which takes no names before 2.12: it refuses those that there are."""
        if isinstance(dim, str) and dim in (self.mesh_dim_names or ()):
            dim = self.mesh_dim_names.index(dim)
        return super()._unflatten(dim, *args, **kwargs)

    # torch computes nothing on a rank outside of a tensor's mesh. There are no ranks here: the
    # process launches on all of a mesh's devices.
    def _is_current_rank_part_of_mesh(self) -> bool:
        return True

    def get_rank(self) -> int:
        """The number of the process's one device. Where a process has several, it is another one
        for each; use `axis_index`.

        Raises:
            PerDeviceValueError: the process drives several devices.
        """
        if not frame_of(self).one_each:
            self._no_rank("get_rank()")
        return processes.index()

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """The coordinate along a mesh dim of this process's devices, if they have the same, as they
        have where each process drives one device. Else use `axis_index`.

        Args:
            mesh_dim: name or number; not needed with one dim.

        Raises:
            MeshDimError: the mesh has no such dim.
            PerDeviceValueError: the process's devices have several.
        """
        found = group_of(self, mesh_dim).own_ranks() if processes.several() else ()
        if len(found) != 1:
            self._no_rank(f"get_local_rank({mesh_dim!r})")
        return found[0]

    def get_coordinate(self) -> list[int]:
        """The coordinate of the process's one device, or of its devices, if they have the same;
        else use `axis_index`.

        Raises:
            PerDeviceValueError: the process's devices have several.
        """
        groups = map(group_of, [self] * self.ndim, range(self.ndim))
        found = [group.own_ranks() for group in groups] if processes.several() else [()]
        if any(len(ranks) != 1 for ranks in found):
            self._no_rank("get_coordinate()")
        return [ranks[0] for ranks in found]

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """What stands for the process group of a mesh dim in torch's functional collectives.

        Args:
            mesh_dim: name or number; not needed with one dim.

        Returns:
            a str, the group's name, which torch's and our collectives take.

        Raises:
            MeshDimError: the mesh has no such dim.
            MeshError: it has several, and none is named.
        """
        return group_of(self, mesh_dim)

    def get_all_groups(self) -> list[Any]:
        """`get_group` of every dim."""
        return [self.get_group(dim) for dim in range(self.ndim)]

    def get_device_num_along_axis(self, name: str) -> int:
        """The number of devices along a mesh dim.

        Args:
            name: of the mesh dim.

        Raises:
            MeshDimError: there is none of that name.
        """
        names = self.mesh_dim_names or ()
        if name not in names:
            raise MeshDimError(f"{self!r} has no mesh dim {name!r}; its dims are {names}")
        return self.size(names.index(name))

    def _no_rank(self, call: str) -> NoReturn:
        whose = "several" if processes.several() else "them all"
        raise PerDeviceValueError(
            f"{self!r}.{call} has a different value on each device, and one process drives {whose}:"
            " xla_dtensor.collectives.axis_index(mesh, dim) has the coordinate along a dim as a "
            "per-device tensor; full_tensor(), local_shards and collectives see every device"
        )

    def __eq__(self, other: object) -> bool:
        # Of equal numbers, `xd.abstract`'s devices and those that are here are others.
        equal = super().__eq__(other)
        if equal is True and isinstance(other, XLADeviceMesh):
            return self._topology is other._topology
        return equal

    __hash__ = DeviceMesh.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_mesh(self)


def _near(layout: Any, numbers: torch.Tensor) -> torch.Tensor:
    """The device numbers of a mesh whose order nobody has chosen: `init_device_mesh` gives the
    layout, and the numbers in ascending order."""
    ids = numbers.tolist()
    if layout is None or ids != list(range(len(ids))):
        return numbers
    order = device_order.near(layout_sizes(layout), runtime.devices(ids))
    return torch.tensor(order, dtype=numbers.dtype, device="cpu")
