"""The order of a TPU's chips in a mesh, by their coordinates as libtpu has them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
from tests.planning.tpus import needs_libtpu
from xla_dtensor.errors import MeshError
from xla_dtensor.mesh import device_order, frame_of

KINDS = {
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
    "v4": "TPU v4",
}


@dataclass(frozen=True)
class Chip:
    """What `mesh_utils` asks of a device."""

    id: int
    device_kind: str
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    platform: str = "tpu"
    process_index: int = 0
    slice_index: int = 0


def chips(kind: str, *shape: int, cores: int = 1) -> list[Chip]:
    """The devices of a slice in JAX's order: x first, cores of a chip together."""
    sizes = (*shape, 1, 1)[:3]
    points = itertools.product(*(range(n) for n in reversed(sizes)), range(cores))
    return [Chip(i, KINDS[kind], (x, y, z), core) for i, (z, y, x, core) in enumerate(points)]


def hops(kind: str, shape: tuple[int, ...], mesh: tuple[int, ...]) -> tuple[float, ...]:
    devices = chips(kind, *shape)
    order = device_order.near(mesh, devices)
    assert sorted(order) == list(range(len(devices)))
    return device_order.mean_hops(np.array([devices[i] for i in order]).reshape(mesh))


@pytest.mark.parametrize(
    ("kind", "shape", "mesh"),
    [
        ("v5e", (16, 16), (16, 16)),
        ("v5e", (16, 16), (256,)),
        ("v5e", (16, 16), (1, 16, 16)),
        ("v5p", (4, 4, 4), (16, 4)),
        ("v5p", (4, 4, 4), (4, 4, 4)),
        ("v6e", (16, 16), (16, 16)),
        ("v6e", (16, 16), (256,)),
    ],
)
def test_neighbours_in_the_mesh_are_linked(kind, shape, mesh) -> None:
    assert max(hops(kind, shape, mesh)) <= 1.25


def test_by_number_they_are_not() -> None:
    """The finding that this is for: 9.0 and 1.9 links in a mesh of 16x16 by number."""
    devices = np.array(chips("v5e", 16, 16)).reshape(16, 16)
    # Chips are numbered as processes have them, four rows of two; line by line is better than that.
    by_process = sorted(devices.flat, key=lambda d: (d.coords[1] // 2, d.coords[0] // 4, d.id))
    far = device_order.mean_hops(np.array(by_process).reshape(16, 16))
    assert max(far) > 1.5


def test_hops_are_counted_by_hand() -> None:
    """4x4 chips of v5e are no torus: from the end of a line back to its beginning are 3 links."""
    grid = np.array(chips("v5e", 4, 4)).reshape(4, 4)
    assert device_order.mean_hops(grid) == ((1 + 1 + 1 + 3) / 4,) * 2
    line = np.array(chips("v5e", 4, 4)).reshape(1, 16)
    # 12 steps within lines, three to the next line (3 + 1 links), one back (3 + 3).
    assert device_order.mean_hops(line) == (0.0, (12 + 3 * 4 + 6) / 16)
    cube = np.array(chips("v5p", 4, 4, 4)).reshape(4, 4, 4)
    assert device_order.mean_hops(cube) == (1.0, 1.0, 1.0)  # whose lines are rings


def test_two_cores_share_a_chip() -> None:
    devices = chips("tpu7x", 2, 2, 1, cores=2)
    assert sorted(device_order.near((4, 2), devices)) == list(range(8))
    by_core = np.array(devices).reshape(4, 2)
    assert device_order.mean_hops(by_core)[1] == 0.0


@pytest.mark.parametrize(
    "devices",
    [
        chips("v5e", 4, 4)[:6],  # not a box
        chips("v4", 2, 2, 1, cores=2),  # of which `mesh_utils` wants one device for two cores
        [Chip(i, KINDS["v5e"], (i % 2, i // 2 % 2, 0), slice_index=i // 6) for i in range(8)],
    ],
    ids=["not a box", "two cores of v4", "slices of six and two"],
)
def test_other_devices_stay_in_order(devices) -> None:
    assert device_order.near((2, len(devices) // 2), devices) == list(range(len(devices)))


def test_simulated_devices_stay_in_order() -> None:
    mesh = xd.init_device_mesh("xla", (2, 4))
    assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(MeshError, match="cpu devices have no coordinates"):
        device_order.mean_hops(frame_of(mesh).jax_mesh.devices)


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch) -> list[Chip]:
    """v5e:4x4 in place of JAX's devices, numbered so that no mesh by number is a good one."""
    from xla_dtensor.runtime import abstract, topologies

    devices = chips("v5e", 4, 4)
    devices = sorted(devices, key=lambda d: (d.coords[0] // 2, d.coords[1] // 2, d.id))
    monkeypatch.setattr(abstract._state, "topology", topologies.Topology("t", "v5e", 16, devices))
    return devices


def test_init_device_mesh_asks(tpu: list[Chip]) -> None:
    mesh = xd.init_device_mesh("xla", (4, 4), mesh_dim_names=("dp", "tp"))
    numbers = mesh.mesh.flatten().tolist()
    assert sorted(numbers) == list(range(16)) and numbers != list(range(16))
    near = np.array([tpu[i] for i in numbers]).reshape(4, 4)
    far = np.array(tpu).reshape(4, 4)
    assert device_order.mean_hops(near) == (1.5, 1.5) < device_order.mean_hops(far)
    # What is cut from it has its devices.
    assert mesh["tp"].mesh.tolist() == numbers[:4]
    assert mesh._flatten("all").mesh.tolist() == numbers


def test_a_given_order_is_obeyed(tpu: list[Chip]) -> None:
    numbers = torch.arange(16).reshape(4, 4)
    assert torch.equal(DeviceMesh("xla", numbers).mesh, numbers.int())
    assert torch.equal(DeviceMesh("xla", numbers.t()).mesh, numbers.t().int())


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "shape"),
    [
        ("v5e:16x16", (16, 16)),
        ("v5p:4x4x4", (16, 4)),
        ("v6e:16x16", (16, 16)),
    ],
)
def test_on_the_compilers_own_devices(topology: str, shape: tuple[int, ...]) -> None:
    with xd.abstract(topology) as block:
        mesh = xd.init_device_mesh("xla", shape)
        devices = frame_of(mesh).jax_mesh.devices
        assert devices.size == math.prod(shape)
        assert max(device_order.mean_hops(devices, block.topology.devices)) <= 1.25
