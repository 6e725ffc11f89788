"""The frame: the JAX mesh behind a torch mesh and all its submeshes.

All tensors of a root mesh live on one JAX mesh, the *frame*: a named axis for each dim of the root.
Submeshes select axes of it; a mesh that ``_unflatten`` made needs finer axes, and refines the
frame. Arrays of a coarser frame stay valid: XLA accepts shardings over different factorisations of
the same device order in one program.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor import runtime
from xla_dtensor.base.tables.cache import Table
from xla_dtensor.base.torch_private.attributes import device_numbers, layout_pieces, root_mesh
from xla_dtensor.errors import MeshError
from xla_dtensor.runtime import abstract, processes


@dataclass(frozen=True)
class Axis:
    """One axis of the JAX mesh: its name, size, and stride in the root mesh's flat device list."""

    name: str
    size: int
    stride: int


class Frame:
    """The JAX mesh of a root mesh.

    Attributes:
        root: the torch root mesh.
        axes: major to minor; sizes multiply to the number of devices.
        jax_mesh: ``jax.sharding.Mesh`` over ``axes``.
        process_axes: the names of those along which another process has the next device; () in a
            process that is alone.
        own_ids: the numbers of this process's devices.
        one_each: whether there are several processes, and each has one device: then what a device
            holds is a process's, and a Python value.
        mesh_dim_axes: per mesh of this root asked about so far, see `mesh_dim_axes`.
    """

    def __init__(self, root: DeviceMesh, axes: tuple[Axis, ...]) -> None:
        import jax

        self.root = root
        self.axes = axes
        self.mesh_dim_axes: dict[DeviceMesh, tuple[tuple[str, ...], ...]] = {}
        self.sizes = {axis.name: axis.size for axis in axes}
        ids = device_numbers(root).tolist()
        devices = np.array(runtime.devices(ids), dtype=object)
        self.device_ids = tuple(ids)
        self.jax_mesh = jax.sharding.Mesh(
            devices.reshape([axis.size for axis in axes]), tuple(axis.name for axis in axes)
        )
        self.one_each = processes.several() and len(ids) == processes.count()
        # Devices that aren't here belong to one process: what the program is for all of them.
        if abstract.current() is not None:
            self.process_axes: tuple[str, ...] = ()
            self.own_ids = frozenset(ids)
        else:
            flat = zip(ids, devices.flat, strict=True)
            self.process_axes = _process_axes(self.jax_mesh)
            self.own_ids = frozenset(
                i for i, d in flat if d.process_index == d.client.process_index()
            )
        self.replicated = jax.sharding.NamedSharding(self.jax_mesh, jax.sharding.PartitionSpec())

    @property
    def is_current(self) -> bool:
        """Whether no mesh has refined it since."""
        return _frames[self.root] is self

    def sharding(self, *spec: Any, memory: str | None = None) -> Any:
        """``NamedSharding`` over this frame of ``PartitionSpec(*spec)``, in the devices' memory or
        in another of JAX's kinds."""
        import jax

        partition = jax.sharding.PartitionSpec(*spec)
        return jax.sharding.NamedSharding(self.jax_mesh, partition, memory_kind=memory)

    def __repr__(self) -> str:
        return f"Frame({', '.join(f'{axis.name}={axis.size}' for axis in self.axes)})"


def _process_axes(jax_mesh: Any) -> tuple[str, ...]:
    owners = np.vectorize(lambda device: device.process_index, otypes=[int])(jax_mesh.devices)
    return tuple(
        name for i, name in enumerate(jax_mesh.axis_names) if np.any(np.diff(owners, axis=i))
    )


# None goes: forms, plans and `is_current` compare the identity of frames, so two of one mesh would
# count as two meshes. There is one for each list of devices that a program makes meshes of.
_frames: Table[DeviceMesh, Frame] = Table(
    "frames", "one per root mesh; compared by identity", clearable=False
)
_frames_lock = threading.RLock()


@contextmanager
def frames_stay() -> Iterator[None]:
    """No other thread refines a frame while this block runs."""
    with _frames_lock:
        yield


def mesh_dim_axes(mesh: DeviceMesh) -> tuple[tuple[str, ...], ...]:
    """For each dim of ``mesh``, the frame axes that it consists of, major to minor.

    Size-1 dims consist of no axis, except where the root has such a dim.
    """
    frame = frame_of(mesh)
    # Per frame: equal meshes may have different roots, whose frames name the axes differently.
    axes = frame.mesh_dim_axes.get(mesh)
    if axes is None:
        axes = frame.mesh_dim_axes[mesh] = _axes_in(frame, mesh)
    return axes


def frame_of(mesh: DeviceMesh) -> Frame:
    """The frame of ``mesh``'s root, refined where ``mesh`` needs finer axes than it has.

    Raises:
        MeshError: the dims of ``mesh`` and of other meshes of the same root cut the devices in
            ways that no common list of axes has (6 devices as 2x3 and as 3x2).
    """
    root = root_mesh(mesh)
    frame = _frames.get(root)
    if frame is not None and (mesh is root or _covers(frame, mesh)):
        return frame
    with _frames_lock:
        frame = _frames.get(root)
        if frame is None:
            frame = _frames[root] = Frame(root, _root_axes(root))
        if mesh is not root and not _covers(frame, mesh):
            frame = _frames[root] = Frame(root, _refined_axes(frame, mesh))
        return frame


def _mesh_dims(mesh: DeviceMesh) -> list[tuple[str, list[tuple[int, int]]]]:
    """Per mesh dim its name and its (size, stride) pieces, major to minor; none of size 1."""
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    return [
        (name, [(size, stride) for size, stride in pieces if size != 1])
        for name, pieces in zip(names, layout_pieces(mesh), strict=True)
    ]


def _root_axes(root: DeviceMesh) -> tuple[Axis, ...]:
    names = root.mesh_dim_names or tuple(f"dim{i}" for i in range(root.ndim))
    strides = [math.prod(root.shape[i + 1 :]) for i in range(root.ndim)]
    return tuple(map(Axis, names, root.shape, strides))


def _boundaries(axes: tuple[Axis, ...]) -> set[int]:
    return {axis.stride for axis in axes} | {axis.stride * axis.size for axis in axes}


def _needed(mesh: DeviceMesh) -> set[int]:
    pieces = [piece for _, dim in _mesh_dims(mesh) for piece in dim]
    return {stride for _, stride in pieces} | {size * stride for size, stride in pieces}


def _covers(frame: Frame, mesh: DeviceMesh) -> bool:
    return _needed(mesh) <= _boundaries(frame.axes)


def _refined_axes(frame: Frame, mesh: DeviceMesh) -> tuple[Axis, ...]:
    cuts = sorted(_boundaries(frame.axes) | _needed(mesh), reverse=True)
    for major, minor in itertools.pairwise(cuts):
        if major % minor:
            raise MeshError(
                f"{mesh!r} cuts the {math.prod(frame.root.shape)} devices of {frame.root!r} at a "
                f"stride of {minor}, other meshes of that root at {major}: no common axes exist. "
                "Make meshes of one root from divisors that divide each other"
            )
    named = {
        (size, stride): name
        for name, pieces in _mesh_dims(mesh)
        for size, stride in pieces
        if len(pieces) == 1
    }
    axes: list[Axis] = []
    used = {axis.name for axis in frame.axes}
    for old in frame.axes:
        inside = [c for c in cuts if old.stride <= c <= old.stride * old.size]
        parts = [(hi // lo, lo) for hi, lo in itertools.pairwise(inside)]
        if len(parts) <= 1:
            axes.append(old)
            continue
        for index, (size, stride) in enumerate(parts):
            name = named.get((size, stride))
            if name is None or name in used:
                name = f"{old.name}.{index}"
            used.add(name)
            axes.append(Axis(name, size, stride))
    return tuple(axes)


def _axes_in(frame: Frame, mesh: DeviceMesh) -> tuple[tuple[str, ...], ...]:
    if mesh is frame.root or mesh == frame.root:
        own = {(a.name, a.size, a.stride) for a in frame.axes}
        roots = _root_axes(frame.root)
        if all((a.name, a.size, a.stride) in own for a in roots):
            return tuple((axis.name,) for axis in roots)
    result = []
    for _, pieces in _mesh_dims(mesh):
        names: list[str] = []
        for size, stride in pieces:
            names += [
                axis.name
                for axis in frame.axes
                if axis.size > 1 and stride <= axis.stride < stride * size
            ]
        result.append(tuple(names))
    return tuple(result)
