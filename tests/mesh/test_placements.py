"""torch placements <-> PartitionSpec over the root mesh's axes."""

from __future__ import annotations

import itertools

import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import tests.conftest as shared
import xla_dtensor as xd
from tests.torch_layouts import all_placements, torch_index
from xla_dtensor.mesh import (
    dim_mesh_dims,
    from_partition_spec,
    normalize_placements,
    placements_of,
    to_partition_spec,
)

R, S, Strided = Replicate(), Shard, _StridedShard


@pytest.mark.parametrize(
    ("placements", "spec"),
    [
        ([R, R, R], P(None, None)),
        ([S(0), R, S(1)], P("pp", "tp")),
        ([S(1), R, R], P(None, "pp")),
        ([S(0), S(0), S(0)], P(("pp", "dp", "tp"), None)),
        ([S(1), S(0), S(1)], P("dp", ("pp", "tp"))),
        ([S(-1), S(-2), R], P("dp", "pp")),
        ([Strided(0, split_factor=2), S(0), R], P(("dp", "pp"), None)),
        ([Strided(-2, split_factor=2), S(-2), R], P(("dp", "pp"), None)),
        ([Strided(0, split_factor=4), S(0), S(0)], P(("dp", "tp", "pp"), None)),
        ([Strided(0, split_factor=2), S(0), S(0)], P(("dp", "pp", "tp"), None)),
        ([Partial(), S(1), Partial()], P(None, "dp")),
    ],
    ids=str,
)
def test_to_partition_spec(placements: list[Placement], spec: P) -> None:
    assert to_partition_spec(placements, shared.make_mesh("2x2x2"), 2) == spec


def test_submeshes_name_root_axes() -> None:
    mesh = shared.make_mesh("2x2x2")
    assert to_partition_spec([S(0)], mesh["tp"], 1) == P("tp")
    assert to_partition_spec([S(1), S(0)], mesh["tp", "pp"], 2) == P("pp", "tp")
    assert to_partition_spec([S(0), S(0)], mesh["tp", "pp"], 1) == P(("tp", "pp"))
    assert to_partition_spec([S(0)], mesh["pp", "tp"]._flatten("pt"), 1) == P(("pp", "tp"))
    assert from_partition_spec(P("tp"), mesh["tp"], 1) == (S(0),)
    assert from_partition_spec(P(("pp", "tp")), mesh["pp", "tp"]._flatten("pt")) == (S(0),)
    assert from_partition_spec(P(("pp", "tp")), mesh["tp", "pp"]) == (
        Strided(0, split_factor=2),
        S(0),
    )


@pytest.mark.parametrize(
    ("mesh_name", "ndim"),
    [
        ("8", 1),
        ("8", 3),
        ("2x4", 1),
        ("2x4", 2),
        ("2x4", 3),
        ("4x2", 2),
        ("2x2x2", 1),
        ("2x2x2", 2),
    ],
)
def test_round_trips(mesh_name: str, ndim: int) -> None:
    mesh = shared.make_mesh(mesh_name)
    seen = set()
    for placements in all_placements(tuple(mesh.shape), ndim):
        spec = to_partition_spec(placements, mesh, ndim)
        assert from_partition_spec(spec, mesh, ndim) == placements
        order = dim_mesh_dims(placements, tuple(mesh.shape), ndim)
        assert placements_of(order, tuple(mesh.shape)) == placements
        seen.add((spec, order))
    assert len({spec for spec, _ in seen}) == len(seen)


def test_every_order_of_every_axis_comes_back() -> None:
    mesh = shared.make_mesh("2x2x2")
    for used in range(4):
        for names in itertools.permutations(mesh.mesh_dim_names, used):
            for cut in range(used + 1):
                groups = [names[:cut], names[cut:]]
                spec = P(*(g[0] if len(g) == 1 else g or None for g in groups))
                placements = from_partition_spec(spec, mesh, 2)
                assert to_partition_spec(placements, mesh, 2) == spec


@pytest.mark.parametrize("mesh_name", ["8", "2x4", "2x2x2"])
def test_a_sharding_holds_what_torch_says(mesh_name: str) -> None:
    """The devices' indices under the PartitionSpec are torch's local shapes and offsets."""
    mesh = shared.make_mesh(mesh_name)
    shape = (16, 8)
    for placements in all_placements(tuple(mesh.shape), 2):
        sharding = distribute_tensor(torch.zeros(shape), mesh, placements).jax_array.sharding
        assert sharding.spec == to_partition_spec(placements, mesh, 2)
        by_device = {d.id: i for d, i in sharding.devices_indices_map(shape).items()}
        coordinates = itertools.product(*map(range, mesh.shape))
        for device, coordinate in enumerate(coordinates):
            expected = torch_index(shape, tuple(mesh.shape), coordinate, placements)
            found = tuple(
                slice(*part.indices(n)[:2])
                for part, n in zip(by_device[device], shape)  # noqa: B905
            )
            assert found == expected, (placements, coordinate)


def test_negative_dims_are_resolved() -> None:
    mesh = shared.make_mesh("2x4")
    assert normalize_placements([S(-1), S(-2)], mesh, 2, "call") == (S(1), S(0))
    assert normalize_placements(None, mesh, 2, "call") == (R, R)
    x = distribute_tensor(torch.zeros(4, 8), mesh, [S(-2), S(-1)])
    assert x.placements == (S(0), S(1))
    assert x.redistribute(placements=[S(-1), R]).placements == (S(1), R)


@pytest.mark.parametrize("split_factor", [2, 3, 8])
def test_split_factors_that_no_mesh_dims_make(split_factor: int) -> None:
    mesh = shared.make_mesh("2x4")
    with pytest.raises(xd.PlacementError) as raised:
        to_partition_spec([Strided(0, split_factor=split_factor), S(0)], mesh, 1)
    assert str(raised.value) == (
        f"to_partition_spec: _StridedShard(dim=0, sf={split_factor}) on mesh dim 0 of a mesh of "
        f"shape (2, 4): no mesh dims to its right cut tensor dim 0 into {split_factor} pieces"
    )


@pytest.mark.parametrize(
    ("spec", "mesh", "message"),
    [
        (
            P("x"),
            "2x4",
            f"from_partition_spec: 'x' in {P('x')} is no whole dim of "
            "DeviceMesh((dp=2, tp=4), 'xla', stride=(4, 1)) (axes ('dp', 'tp'))",
        ),
        (P(None, None, "dp"), "2x4", "has more entries than 2 dims"),
        (P("dp", "dp"), "2x4", "uses ('dp',) twice"),
    ],
)
def test_specs_that_mean_no_placements(spec: P, mesh: str, message: str) -> None:
    with pytest.raises(xd.PlacementError) as raised:
        from_partition_spec(spec, shared.make_mesh(mesh), 2)
    assert message in str(raised.value)


def test_sizes_of_one() -> None:
    mesh = DeviceMesh("xla", [[0], [1]], mesh_dim_names=("a", "b"))
    assert to_partition_spec([S(0), S(1)], mesh, 2) == P("a", "b")
    assert from_partition_spec(P("a", "b"), mesh) == (S(0), S(1))
    assert to_partition_spec([S(0)], mesh["b"], 1) == P(None)  # a submesh's size-1 dims cut nothing
