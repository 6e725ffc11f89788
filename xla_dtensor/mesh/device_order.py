"""In which order a mesh takes a TPU's chips, and how many links neighbours in it are apart.

TPU chips are the points of a torus, and talk to the next ones only. JAX numbers them line by line,
so a mesh that takes them by number has neighbours that lie many links apart. JAX's `mesh_utils`
knows which order folds a mesh of a given shape into the torus; dims further right get the better
places, as those of ``(dp, tp)`` want it. Of several slices each is folded by itself, and the
mesh's outermost dims lie across them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xla_dtensor.errors import MeshError
from xla_dtensor.mesh.domains import across, domains

# Kinds with a 2D torus are pods of 16x16 chips, of which a full axis is a ring; the others have a
# 3D torus, built from cubes of 4x4x4 chips, and an axis of whole cubes is one
# (https://docs.cloud.google.com/tpu/docs/v5e, /v6e, /v5p, /tpu7x).
_FLAT = ("lite", "v5e", "v6e")
_POD = 16


def near(shape: Sequence[int], devices: Sequence[Any]) -> list[int]:
    """The order in which a mesh of ``shape`` takes the devices.

    Args:
        shape: of the mesh.
        devices: JAX's, in their own order; as many as the mesh has.

    Returns:
        positions in ``devices``, in the mesh's row-major order. In one domain (`domains`) they are
        ascending where the devices aren't a box of TPU chips: JAX's order keeps the devices of a
        host together. The outermost dims lie across domains.
    """
    ids = list(range(len(devices)))
    if math.prod(shape) != len(devices) or len(devices) < 2:
        return ids
    numbers = domains(devices)
    outer = across(shape, numbers)
    if math.prod(outer) > 1:
        return _of_several(shape, outer, devices, numbers)
    if not _is_box(devices):
        return ids
    from jax.experimental import mesh_utils

    array = mesh_utils.create_device_mesh(
        tuple(shape), list(devices), allow_split_physical_axes=True
    )
    position = {id(device): i for i, device in enumerate(devices)}
    return [position[id(device)] for device in array.flat]


def _of_several(
    shape: Sequence[int], outer: Sequence[int], devices: Sequence[Any], numbers: Sequence[int]
) -> list[int]:
    """The order of domains' devices: a grid of domains, ``outer``, each of them a mesh."""
    inner = [size // many for size, many in zip(shape, outer, strict=True)]
    whole = np.empty((*outer, *inner), int)
    each = whole.reshape(-1, math.prod(inner))
    for place, number in zip(each, sorted(set(numbers)), strict=True):
        own = [i for i, n in enumerate(numbers) if n == number]
        order = near(inner, [devices[i] for i in own])
        place[:] = [own[i] for i in order]
    pairs = [axis for dim in range(len(shape)) for axis in (dim, dim + len(shape))]
    return [int(i) for i in whole.transpose(pairs).flat]


def _is_box(devices: Sequence[Any]) -> bool:
    """Whether the devices are all those of a box of chips, of one slice, as `mesh_utils` wants."""
    if devices[0].platform != "tpu" or any(
        getattr(d, "coords", None) is None or len(d.coords) != 3 for d in devices
    ):
        return False
    if len({getattr(d, "slice_index", 0) for d in devices}) > 1:
        return False
    cores = len({d.core_on_chip for d in devices})
    if cores > 1 and not any(kind in devices[0].device_kind for kind in ("v5p", "7", "v2", "v3")):
        return False  # it takes a chip of this kind for one device
    return math.prod(_box(devices)) * cores == len(devices)


def _box(devices: Sequence[Any]) -> tuple[int, ...]:
    coords = np.array([device.coords for device in devices])
    return tuple(int(n) for n in coords.max(0) - coords.min(0) + 1)


def rings(devices: Sequence[Any]) -> tuple[bool, ...]:
    """For each axis of the chips' box whether its ends are linked."""
    kind = devices[0].device_kind.lower()
    flat = any(name in kind for name in _FLAT)
    return tuple(n == _POD if flat else n % 4 == 0 for n in _box(devices))


def mean_hops(devices: np.ndarray, links: Sequence[Any] | None = None) -> tuple[float, ...]:
    """How many links neighbours along each dim of a mesh are apart, in the mean; the last and the
    first are neighbours, too. 1 is best, or 0 where a dim's devices share a chip. Between those of
    different slices there are no links, and they don't count.

    Args:
        devices: TPU devices in the mesh's shape.
        links: all devices that are linked to each other; by default those of the mesh.

    Returns:
        a number per dim; 0.0 for dims of size 1.

    Raises:
        MeshError: the devices have no coordinates.
    """
    first = devices.flat[0]
    if getattr(first, "coords", None) is None:
        raise MeshError(
            f"hops are counted between chips of a TPU, and {first.platform} devices have no "
            "coordinates"
        )
    every = list(devices.flat) if links is None else list(links)
    box, closed = _box(every), rings(every)
    coords = np.array([device.coords for device in devices.flat]).reshape(*devices.shape, -1)
    slices = np.array(domains(list(devices.flat))).reshape(devices.shape)
    found = []
    for dim, size in enumerate(devices.shape):
        if size == 1:
            found.append(0.0)
            continue
        apart = np.abs(np.roll(coords, -1, axis=dim) - coords)
        for axis, (n, ring) in enumerate(zip(box, closed, strict=True)):
            if ring:
                apart[..., axis] = np.minimum(apart[..., axis], n - apart[..., axis])
        linked = slices == np.roll(slices, -1, axis=dim)
        found.append(float(apart.sum(-1)[linked].mean()) if linked.any() else 0.0)
    return tuple(found)


class Extent(NamedTuple):
    """How far a mesh dim goes along an axis of a torus: over how many devices, and whether these
    are a ring."""

    length: int
    is_ring: bool


def extents(devices: np.ndarray) -> tuple[tuple[Extent, ...], ...]:
    """For each dim of a mesh the axes of the torus that it extends along; of several slices those
    of each. It goes around a ring where it has the whole axis and that is one.

    Args:
        devices: TPU devices in the mesh's shape.
    """
    every = list(devices.flat)
    box, closed = _box(every), rings(every)
    coords = np.array([device.coords for device in every]).reshape(*devices.shape, -1)
    found = []
    for dim in range(devices.ndim):
        first = np.moveaxis(coords, dim, 0).reshape(devices.shape[dim], -1, coords.shape[-1])[:, 0]
        sizes = [len(set(first[:, axis].tolist())) for axis in range(coords.shape[-1])]
        found.append(
            tuple(
                Extent(size, ring and size == n)
                for size, n, ring in zip(sizes, box, closed, strict=True)
                if size > 1
            )
        )
    return tuple(found)
