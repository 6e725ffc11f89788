"""DeviceMesh("xla", ...): made, cut, compared and pickled as torch's own CPU meshes are."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tests.conftest as shared
import xla_dtensor as xd
from xla_dtensor.mesh import frame_of, mesh_dim_axes, root_mesh

NAMES = ("pp", "dp", "tp")


def mesh_of(device_type: str, shape: tuple[int, ...] = (2, 2, 2), names: object = NAMES):
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def unflatten(mesh: DeviceMesh, name: str, sizes: tuple[int, ...], names: Any) -> DeviceMesh:
    """By the dim's name; of a mesh of torch's own by its number, as torch 2.11 takes no names."""
    dim = name if mesh.device_type == "xla" else mesh.mesh_dim_names.index(name)
    return mesh._unflatten(dim, sizes, names)


# What can be done to a (2, 2, 2) mesh with dims pp, dp, tp.
CUTS: dict[str, Callable[[DeviceMesh], DeviceMesh]] = {
    "nothing": lambda m: m,
    "one dim": lambda m: m["dp"],
    "a tuple of one": lambda m: m[("tp",)],
    "two dims": lambda m: m["pp", "tp"],
    "all dims": lambda m: m["pp", "dp", "tp"],
    "a slice of a slice": lambda m: m["pp", "tp"]["tp"],
    "flatten two": lambda m: m["pp", "dp"]._flatten(),
    "flatten the outer ones": lambda m: m["pp", "tp"]._flatten("outer"),
    "flatten all": lambda m: m._flatten("world"),
    "flatten one": lambda m: m["dp"]._flatten("other"),
    "flatten one to its name": lambda m: m["dp"]._flatten("dp"),
    "unflatten a flattened": lambda m: (
        m["dp", "tp"]._flatten("f")._unflatten(0, (2, 2), ("a", "b"))
    ),
    "unflatten all": lambda m: unflatten(m._flatten("w"), "w", (4, 2), ("a", "b")),
    "slice of unflattened": lambda m: m._flatten("v")._unflatten(0, (4, 2), ("a", "b"))["a"],
    "unflatten a dim of one": lambda m: unflatten(m, "dp", (2, 1), ("x", "y")),
    "concatenate": lambda m: DeviceMesh._concatenate([m["pp"], m["tp"]]),
    "concatenate flattened": lambda m: DeviceMesh._concatenate([m["pp", "dp"]._flatten(), m["tp"]]),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.usefixtures("fake_process_group")
def test_cuts_are_torchs(cut: Callable[[DeviceMesh], DeviceMesh]) -> None:
    ours, torchs = cut(mesh_of("xla")), cut(mesh_of("cpu"))
    assert ours.device_type == "xla"
    assert ours.mesh_dim_names == torchs.mesh_dim_names
    assert ours.shape == torchs.shape
    assert ours.ndim == torchs.ndim
    assert ours.size() == torchs.size()
    assert [ours.size(i) for i in range(ours.ndim)] == [torchs.size(i) for i in range(ours.ndim)]
    assert ours.mesh.dtype == torchs.mesh.dtype
    assert ours.mesh.tolist() == torchs.mesh.tolist()
    assert repr(ours) == repr(torchs).replace("'cpu'", "'xla'")
    assert root_mesh(ours) == mesh_of("xla")


@pytest.mark.parametrize("shape", [(8,), (2, 4), (4, 2), (2, 2, 2), (1,), (1, 8), (2, 1, 4)])
def test_init_device_mesh(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("xla", shape)
    assert isinstance(mesh, DeviceMesh)
    assert isinstance(mesh, xd.XLADeviceMesh)
    assert mesh.mesh.tolist() == torch.arange(mesh.size()).reshape(shape).tolist()
    assert (mesh.shape, mesh.ndim, mesh.mesh_dim_names) == (shape, len(shape), None)
    assert xd.init_device_mesh is init_device_mesh
    assert mesh == DeviceMesh("xla", torch.arange(mesh.size()).reshape(shape))


def test_other_device_types_are_left_alone(fake_process_group: None) -> None:
    assert type(mesh_of("cpu")) is DeviceMesh


@pytest.mark.parametrize(
    "names", [("tp", "dp"), ("tp", "pp", "dp"), ("dp", "tp", "pp"), ("tp", "pp"), ("dp", "pp")]
)
def test_dims_in_any_order(names: tuple[str, ...]) -> None:
    """torch documents mesh["cp", "dp"], but raises: the truth is the transposed device tensor."""
    mesh = mesh_of("xla")
    sub = mesh[names]
    left_out = [i for i, name in enumerate(NAMES) if name not in names]
    devices = torch.arange(8).reshape(2, 2, 2).permute([*map(NAMES.index, names), *left_out])
    assert sub.mesh_dim_names == names
    assert sub.mesh.tolist() == devices.reshape(*sub.shape, -1)[..., 0].tolist()
    assert root_mesh(sub) is mesh
    assert sub[names[0]] == mesh[names[0]]


def test_flattened_dims_slice_the_root() -> None:
    mesh = mesh_of("xla")
    flat = mesh["pp", "dp"]._flatten()
    assert mesh["pp_dp"] is flat
    assert flat is mesh["pp", "dp"]._flatten()
    assert mesh["tp", "pp_dp"].mesh.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_the_same_slice_twice() -> None:
    mesh = mesh_of("xla")
    for first, second in [
        (mesh["tp"], mesh["tp"]),
        (mesh["tp", "pp"], mesh["tp", "pp"]),
        (mesh["pp", "tp"]["tp"], mesh["tp"]),
        (mesh["dp"], mesh_of("xla")["dp"]),
        (mesh["dp", "tp"]._flatten("a"), mesh["dp", "tp"]._flatten("a")),
    ]:
        assert first == second
        assert hash(first) == hash(second)
        assert mesh_dim_axes(first) == mesh_dim_axes(second)
        assert root_mesh(first) == root_mesh(second)
        assert frame_of(first) is frame_of(second) is frame_of(mesh)
    different = [mesh["tp"], mesh["dp"], mesh["tp", "dp"], mesh["dp", "tp"], mesh]
    assert len(set(different)) == len(different)


def test_root_mesh_dims() -> None:
    mesh = mesh_of("xla")
    assert mesh_dim_axes(mesh) == (("pp",), ("dp",), ("tp",))
    assert mesh_dim_axes(mesh["tp", "pp"]) == (("tp",), ("pp",))
    assert mesh_dim_axes(mesh["pp", "tp"]._flatten("pt")) == (("pp", "tp"),)
    assert mesh_dim_axes(mesh) == (("pp",), ("dp",), ("tp",))


def test_equal_meshes_of_different_roots() -> None:
    """Equal by torch's definition, on frames whose axes have other names."""
    value = torch.arange(64.0).reshape(8, 8)
    root = init_device_mesh("xla", (8,), mesh_dim_names=("w",))
    first = root._unflatten(0, (2, 4), ("a", "b"))
    second = root._unflatten(0, (2, 4), ("dp", "tp"))
    own = init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    assert second == own
    for mesh in (own, first, second, own):
        x = distribute_tensor(value, mesh, [Shard(1), Shard(0)])
        assert torch.equal((x + x).full_tensor().cpu(), value + value)
        assert x.local_shards[1].index == (slice(2, 4), slice(0, 4))


def test_unflatten_refines_the_root() -> None:
    value = torch.arange(32.0).reshape(8, 4)
    root = init_device_mesh("xla", (8,), mesh_dim_names=("w",))
    before = distribute_tensor(value, root, [Shard(0)])
    fine = root._unflatten("w", (2, 2, 2), ("a", "b", "c"))
    on_fine = distribute_tensor(value, fine, [Shard(0), Replicate(), Shard(1)])
    again = before.redistribute(fine, [Shard(0), Replicate(), Shard(1)])
    assert torch.equal((again * on_fine).full_tensor().cpu(), value * value)
    assert torch.equal((before + before).full_tensor().cpu(), value + value)
    assert again.local_shards[3].index == (slice(0, 4), slice(2, 4))


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m,
        lambda m: m["tp"],
        lambda m: m["tp", "dp"],
        lambda m: m["pp", "dp"]._flatten(),
        lambda m: m._unflatten("dp", (2, 1), ("x", "y"))["x", "tp"],
    ],
)
@pytest.mark.parametrize("copy_of", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy])
def test_pickling(
    make: Callable[[DeviceMesh], DeviceMesh], copy_of: Callable[[DeviceMesh], DeviceMesh]
) -> None:
    root = mesh_of("xla")
    root["dp", "tp"]._flatten("flat")
    mesh = make(root)
    other = copy_of(mesh)
    assert type(other) is type(mesh)
    assert (other, hash(other), repr(other)) == (mesh, hash(mesh), repr(mesh))
    assert root_mesh(other) == root
    assert root_mesh(other)["flat"] == root["flat"]
    assert mesh_dim_axes(other) == mesh_dim_axes(mesh)


def test_pickling_between_processes() -> None:
    """The hash of a mesh contains strings': it is another one in each process."""
    code = (
        "import sys, pickle, xla_dtensor as xd\n"
        "mesh = xd.init_device_mesh('xla', (2, 4), mesh_dim_names=('dp', 'tp'))\n"
        "hash(mesh), hash(mesh['tp'])\n"
        "sys.stdout.buffer.write(pickle.dumps([mesh, mesh['tp']]))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    mesh, tp = pickle.loads(made.stdout)
    own = shared.make_mesh("2x4")
    assert (mesh, tp) == (own, own["tp"])
    assert {own: 1, own["tp"]: 2} == {mesh: 1, tp: 2}


SUBSETS = [[3], [6, 2, 5], [[6, 2], [5, 1]], [[7, 6, 5, 4], [3, 2, 1, 0]], [[[1], [0]], [[4], [7]]]]


@pytest.mark.parametrize("devices", SUBSETS, ids=str)
def test_any_devices_in_any_order(devices: list) -> None:
    mesh = DeviceMesh("xla", devices)
    assert mesh.mesh.tolist() == devices
    placements = [Shard(i % 2) for i in range(mesh.ndim)]
    value = torch.randn(6, 5)
    x = distribute_tensor(value, mesh, placements)
    assert [s.device for s in x.local_shards] == torch.tensor(devices).flatten().tolist()
    physical = {d.id for d in x.jax_array.devices()}
    assert physical == set(torch.tensor(devices).flatten().tolist())
    for shard in x.local_shards:
        assert torch.equal(shard.data, value[shard.index])
    result = torch.softmax(x @ x.T, 0)
    torch.testing.assert_close(result.full_tensor().cpu(), torch.softmax(value @ value.T, 0))


def test_shards_follow_the_device_order() -> None:
    mesh = DeviceMesh("xla", [5, 0, 3])
    x = distribute_tensor(torch.arange(3), mesh, [Shard(0)])
    assert {s.device: s.data.tolist() for s in x.local_shards} == {5: [0], 0: [1], 3: [2]}


def test_submesh_of_a_subset() -> None:
    mesh = DeviceMesh("xla", [[6, 2], [5, 1]], mesh_dim_names=("a", "b"))
    assert mesh["a"].mesh.tolist() == [6, 5]
    x = distribute_tensor(torch.arange(4.0), mesh["b"], [Shard(0)])
    assert {s.device: s.data.tolist() for s in x.local_shards} == {
        6: [0, 1], 5: [0, 1], 2: [2, 3], 1: [2, 3]
    }  # fmt: skip
    assert torch.equal((x * 2).full_tensor().cpu(), torch.arange(4.0) * 2)


def test_current_mesh() -> None:
    with shared.make_mesh("2x4") as mesh:
        x = distribute_tensor(torch.ones(4))
    assert (x.device_mesh, x.placements) == (mesh, (Replicate(), Replicate()))


def test_meshes_without_common_axes() -> None:
    root = DeviceMesh("xla", list(range(6)), mesh_dim_names=("w",))
    distribute_tensor(torch.ones(6), root._unflatten(0, (2, 3), ("a", "b")))
    with pytest.raises(xd.MeshError, match="no common axes exist"):
        distribute_tensor(torch.ones(6), root._unflatten(0, (3, 2), ("c", "d")))
