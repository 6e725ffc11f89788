"""``Mesh``, ``HybridMesh`` and the global mesh of torch_xla."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jax.experimental import mesh_utils
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor import mesh as meshes
from xla_dtensor.base.torch_private.attributes import layout_of_mesh
from xla_dtensor.compat.torch_xla import runtime
from xla_dtensor.compat.torch_xla.errors import SpmdError
from xla_dtensor.mesh import XLADeviceMesh
from xla_dtensor.mesh.combinable import let_meet


class _Shape(tuple[int, ...]):
    """``mesh.shape`` is a tuple to torch, and a method to torch_xla."""

    named: OrderedDict[Any, int]

    def __call__(self) -> OrderedDict[Any, int]:
        return self.named


class Mesh(XLADeviceMesh):
    """A mesh of devices, made as torch_xla makes one. It is a ``DeviceMesh``, so torch's functions
    take it, too.

    Args:
        device_ids: the numbers of the devices, in the mesh's row-major order.
        mesh_shape: the number of devices along each axis.
        axis_names: a name for each axis.

    Raises:
        SpmdError: not as many devices as the shape has, one of them twice, or not as many names as
            axes; it is an AssertionError as well.

    Example::

        import numpy as np
        import xla_dtensor.compat.torch_xla.distributed.spmd as xs

        mesh = xs.Mesh(np.arange(8), (2, 4), ("data", "model"))
        assert mesh.shape() == {"data": 2, "model": 4} and mesh.size() == 8
        assert mesh.get_logical_mesh()[1].tolist() == [4, 5, 6, 7]
        assert mesh["model"].size() == 4  # a submesh
    """

    def __init__(
        self,
        device_ids: Any,
        mesh_shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
    ) -> None:
        ids = np.asarray(device_ids).reshape(-1).astype(int)
        shape = tuple(int(size) for size in mesh_shape)
        names = None if axis_names is None else tuple(axis_names)
        call = f"Mesh({ids.tolist()}, {shape}, {names})"
        if names is not None and (len(names) != len(shape) or len(set(names)) != len(names)):
            raise SpmdError(f"{call}: give each of the {len(shape)} axes a name of its own")
        if len(ids) != np.prod(shape):
            raise SpmdError(f"{call}: {len(ids)} devices for a shape of {np.prod(shape)}")
        if len(set(ids.tolist())) != len(ids):
            raise SpmdError(f"{call}: each device can be in it once")
        if ids.max() >= len(ids) or ids.min() < 0:
            raise SpmdError(f"{call}: the devices are numbered from 0 to {len(ids) - 1}")
        numbers = torch.as_tensor(ids).reshape(shape)
        DeviceMesh("xla", numbers)  # has torch told about xla meshes, with the first one
        super().__init__("xla", numbers, mesh_dim_names=names)
        let_meet(self)
        self.device_ids = ids
        self.mesh_shape = shape
        self.axis_names = names

    @property
    def shape(self) -> Any:
        """The sizes of the axes, a tuple; called, an ``OrderedDict`` by name, or by number if they
        have no names."""
        sizes = _Shape(layout_of_mesh(self).top_level_sizes)
        names = self.mesh_dim_names or range(len(sizes))
        sizes.named = OrderedDict(zip(names, sizes, strict=True))
        return sizes

    def get_logical_mesh(self) -> np.ndarray:
        """The device numbers, an array of the mesh's shape."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """The number of an axis, or None if there is none of that name."""
        names = self.axis_names or ()
        return names.index(name) if name in names else None

    def get_op_sharding(self, partition_spec: Sequence[Any]) -> OpSharding:
        """What XLA calls a sharding over this mesh."""
        return OpSharding(self, tuple(partition_spec))

    def to_device_mesh(self) -> DeviceMesh:
        """The mesh as torch's: itself."""
        return self


class OpSharding(SimpleNamespace):
    """A mesh and a partition spec."""

    def __init__(self, mesh: Mesh, partition_spec: tuple[Any, ...]) -> None:
        super().__init__(mesh=mesh, partition_spec=partition_spec)


class HybridMesh(Mesh):
    """A mesh whose outer parts are connected by a slower network: devices of one slice lie next to
    each other along the axes of ``ici_mesh_shape``, slices along those of ``dcn_mesh_shape``. JAX's
    ``mesh_utils`` says in which order.

    Args:
        ici_mesh_shape: within a slice, from the least communication to the most.
        dcn_mesh_shape: of slices, one number per axis; all 1 by default.
        axis_names: a name for each axis.

    Raises:
        ValueError: there are several slices, and no ``dcn_mesh_shape``, or the other way round; or
            the shapes don't fit the devices.

    Example::

        import xla_dtensor.compat.torch_xla.distributed.spmd as xs

        mesh = xs.HybridMesh(ici_mesh_shape=(2, 4), axis_names=("data", "model"))
        assert mesh.mesh_shape == (2, 4)
    """

    def __init__(
        self,
        *,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> None:
        ici = tuple(ici_mesh_shape)
        dcn = (1,) * len(ici) if dcn_mesh_shape is None else tuple(dcn_mesh_shape)
        if len(ici) != len(dcn):
            raise SpmdError(f"HybridMesh: {ici} and {dcn} need a number for each axis")
        devices = _described(runtime.global_runtime_device_attributes())
        several = len({device.slice_index for device in devices}) > 1
        if several and np.prod(dcn) == 1:
            raise ValueError("Provide dcn_mesh_shape to create a mesh for multislice")
        if not several and np.prod(dcn) > 1:
            raise ValueError("Invalid dcn_mesh_shape for single slice mesh")
        if several:
            found = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices)
        else:
            found = mesh_utils.create_device_mesh(ici, devices)
        ids = np.vectorize(lambda device: device.id, otypes=[int])(found)
        self.ici_mesh_shape, self.dcn_mesh_shape = ici, dcn
        super().__init__(ids.reshape(-1), tuple(np.multiply(ici, dcn)), axis_names)


def _described(attributes: list[dict[str, Any]]) -> list[Any]:
    """The devices as JAX's ``mesh_utils`` wants to see them, in the order of their numbers."""
    devices = []
    for known in attributes:
        platform, _, number = known["name"].rpartition(":")
        devices.append(
            SimpleNamespace(
                id=int(number),
                platform="tpu" if "coords" in known else platform.lower(),
                device_kind=platform,
                coords=known.get("coords"),
                core_on_chip=known.get("core_on_chip", 0),
                slice_index=known.get("slice_index", 0),
                process_index=0,
            )
        )
    return sorted(devices, key=lambda device: device.id)


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """A mesh with all devices along one axis.

    Args:
        axis_name: its name.

    Example::

        import xla_dtensor.compat.torch_xla.distributed.spmd as xs

        mesh = xs.get_1d_mesh("data")
        assert mesh.axis_names == ("data",) and mesh.ndim == 1
    """
    count = runtime.global_runtime_device_count()
    return Mesh(np.arange(count), (count,), None if axis_name is None else (axis_name,))


_global: Mesh | None = None


def set_global_mesh(mesh: Mesh | None) -> None:
    """Let ``mesh`` be the one of functions that are given none, torch's as well.

    Args:
        mesh: None for none.

    Example::

        import xla_dtensor.compat.torch_xla.distributed.spmd as xs

        mesh = xs.get_1d_mesh("data")
        xs.set_global_mesh(mesh)
        assert xs.get_global_mesh() is mesh
        xs.set_global_mesh(None)
    """
    global _global
    _global = mesh
    meshes.set_mesh(mesh)


def get_global_mesh() -> Mesh | None:
    """What `set_global_mesh` was given, or None."""
    return _global


def mesh_or_global(mesh: DeviceMesh | None, call: str) -> DeviceMesh:
    """``mesh``, or the global one.

    Raises:
        SpmdError: there is none.
    """
    found = mesh if mesh is not None else _global
    if found is None:
        raise SpmdError(f"{call}: give mesh=, or set one for all by set_global_mesh(mesh)")
    return found
