"""`Layout`: one value, three notations."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from jax.sharding import PartitionSpec
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor import Layout

R, S = Replicate(), Shard


@pytest.fixture
def layout() -> Layout:
    return Layout((2, 2, 2), ("dp", "cp", "tp"))


# alias names, dims_mapping, placements, tensor_map (mesh dims counted from the last), spec
ROWS = [
    (("None", "None"), [-1, -1], (R, R, R), (-1, -1), (None, None)),
    (("dp", "None"), [0, -1], (S(0), R, R), (2, -1), ("dp", None)),
    (("None", "dp"), [-1, 0], (S(1), R, R), (-1, 2), (None, "dp")),
    (("dp", "tp"), [0, 2], (S(0), R, S(1)), (2, 0), ("dp", "tp")),
    ((("dp", "tp"), "None"), [[0, 2], -1], (S(0), R, S(0)), ((2, 0), -1), (("dp", "tp"), None)),
    (
        (("tp", "dp"), "None"),
        [[2, 0], -1],
        (_StridedShard(0, split_factor=2), R, S(0)),
        ((0, 2), -1),
        (("tp", "dp"), None),
    ),
    (("cp", ("tp", "dp"), "None"), [1, [2, 0], -1], None, (1, (0, 2), -1), None),
    ((), [], (R, R, R), (), ()),
]


@pytest.mark.parametrize(("names", "mapping", "placements", "tensor_map", "spec"), ROWS)
def test_the_three_notations_agree(layout, names, mapping, placements, tensor_map, spec):
    made = layout(*names)
    assert made.alias_tensor_map == names
    assert made.dims_mapping == mapping
    assert made.tensor_map == tensor_map
    assert made == Layout.from_dims_mapping(layout.mesh, mapping)
    assert hash(made) == hash(Layout.from_dims_mapping(layout.mesh, mapping))
    if placements is not None:
        assert made.placements == placements
        assert made == layout(*placements, ndim=len(names)) == layout(placements, ndim=len(names))
    if spec is not None:
        assert made.partition_spec == PartitionSpec(*spec)
        assert made == Layout.from_partition_spec(layout.mesh, PartitionSpec(*spec))
    assert made.ndim == len(names) and made.is_concrete


def test_none_may_be_the_object(layout):
    assert layout("dp", None) == layout("dp", "None")


def test_a_partition_spec_may_be_shorter_than_the_tensor(layout):
    made = Layout.from_partition_spec(layout.mesh, PartitionSpec("dp"), ndim=3)
    assert made.alias_tensor_map == ("dp", "None", "None")


def test_partial(layout):
    made = layout("dp", "None").with_partial("tp")
    assert made.is_partial() and made.partial == (None, None, "sum")
    assert made.placements == (S(0), R, Partial())
    assert made.alias_tensor_map == ("dp", "None")
    assert made != layout("dp", "None") and not layout("dp", "None").is_partial()
    assert layout("dp").with_partial(-1, "max").partial == (None, None, "max")
    assert made.with_partial("tp", "avg").partial == (None, None, "avg")


def test_shapes(layout):
    made = layout("dp", ("tp", "cp"), "None")
    assert made.local_shape((8, 16, 5)) == (4, 4, 5)
    assert made.global_shape((4, 4, 5)) == (8, 16, 5)
    assert layout(S(0), R, S(0)).local_shape((8, 3)) == (2, 3)  # of any rank


def test_values(layout):
    assert layout("dp") != Layout((2, 4), ("dp", "tp"))("dp")
    assert layout("dp") != layout(S(0), R, R)  # the second one has no rank
    assert layout == Layout.from_device_mesh(layout.mesh) and layout != layout()
    assert len({layout("dp"), layout("dp"), layout("tp")}) == 2
    for copied in (copy.deepcopy(layout("dp")), pickle.loads(pickle.dumps(layout("dp")))):
        assert copied == layout("dp")
    with pytest.raises(AttributeError, match="immutable"):
        layout.mesh = None
    assert (layout == 3) is False


def test_repr(layout):
    assert repr(layout) == "Layout(dp=2, cp=2, tp=2)"
    assert repr(layout("dp", ("tp", "cp"))) == "Layout(dp=2, cp=2, tp=2; [dp, (tp, cp)])"
    assert repr(layout("None").with_partial("tp")) == (
        "Layout(dp=2, cp=2, tp=2; [None]; sum over tp)"
    )
    assert repr(layout(S(0), R, Partial())) == "Layout(dp=2, cp=2, tp=2; S(0), R, P(sum))"


def test_of_a_tensor(mesh):
    for placements in ((S(0),) + (R,) * (mesh.ndim - 1), (R,) * (mesh.ndim - 1) + (S(1),)):
        x = distribute_tensor(torch.randn(8, 8), mesh, placements)
        assert x.layout == Layout.from_placements(mesh, placements, 2)
        assert x.layout is x.layout
        assert tuple(x.to_local().shape) == x.layout.local_shape(x.shape)
        assert x.layout.global_shape(x.to_local().shape) == tuple(x.shape)


def test_of_a_submesh():
    mesh = make_mesh("2x2x2")["dp", "tp"]
    made = Layout.from_device_mesh(mesh)("tp", "dp")
    assert made.dims_mapping == [1, 0] and made.partition_spec == PartitionSpec("tp", "dp")


def test_of_chosen_devices():
    made = Layout((2, 2), ("a", "b"), devices=[7, 5, 3, 1])
    assert made.mesh.mesh.tolist() == [[7, 5], [3, 1]]


def test_mesh_counts_devices():
    mesh = make_mesh("2x4")
    assert mesh.get_device_num_along_axis("tp") == 4
    with pytest.raises(KeyError, match=r"no mesh dim 'pp'; its dims are \('dp', 'tp'\)"):
        mesh.get_device_num_along_axis("pp")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: x("dp", "dp"), xd.PlacementError, "'dp' .* tensor dim 0 and again .* dim 1"),
        (lambda x: x(("dp", "dp")), xd.PlacementError, "'dp' of .* tensor dim 0 and again"),
        (lambda x: x("pp"), xd.MeshDimError, "has no mesh dim 'pp'"),
        (lambda x: x(S(0), "dp"), xd.PlacementError, "mixes placements"),
        (lambda x: x(S(0)), xd.PlacementError, "got 1 placements"),
        (lambda x: x(S(2), R, R, ndim=2), xd.PlacementError, "has 2 dims"),
        (lambda x: x("dp", ndim=2), xd.PlacementError, "1 alias names for a tensor of 2 dims"),
        (lambda x: x.placements, xd.PlacementError, "has a mesh alone"),
        (lambda x: x.with_partial("tp"), xd.PlacementError, "has a mesh alone"),
        (lambda x: x("tp").with_partial("tp"), xd.PlacementError, "shards the tensor already"),
        (lambda x: x("dp").with_partial("tp", "mean"), xd.PlacementError, "the reductions are sum"),
        (lambda x: x("dp").with_partial(3), xd.MeshDimError, "no mesh dim 3"),
        (lambda x: x(S(0), R, R).dims_mapping, xd.PlacementError, "give it: .*ndim=2"),
        (lambda x: x("dp").local_shape((3,)), xd.PlacementError, "size 3 doesn't divide by 2"),
        (lambda x: x("dp").local_shape((4, 4)), xd.PlacementError, "of a tensor of 1 dims"),
        (lambda x: x(S(1), R, R).local_shape((4,)), xd.PlacementError, "doesn't have"),
        (
            lambda x: Layout.from_dims_mapping(x.mesh, [3]),
            xd.PlacementError,
            "has no mesh dim 3",
        ),
        (
            lambda x: Layout.from_dims_mapping(x.mesh, [0, 0]),
            xd.PlacementError,
            r"dims_mapping \[0, 0\] uses mesh dim 'dp'",
        ),
        (
            lambda x: Layout.from_partition_spec(x.mesh, PartitionSpec("dp", "dp")),
            xd.PlacementError,
            "twice",
        ),
    ],
)
def test_mistakes(layout, make, error, message):
    with pytest.raises(error, match=message):
        make(layout)


def test_it_says_that_a_tensor_is_dense(mesh_2x4):
    x = xd.distribute_tensor(torch.randn(8, 4), mesh_2x4, [xd.Shard(0), xd.Replicate()])
    assert x.layout == torch.strided and torch.strided == x.layout
    assert x.layout in {torch.strided, torch.sparse_coo} and x.layout in (torch.strided,)
    assert x.layout != torch.sparse_coo and x.layout not in {torch.sparse_csr}
    assert not x.layout != torch.strided  # noqa: SIM202  (the operator itself)
    assert {x.layout: 1}[x.clone().layout] == 1 and x.layout != x.t().layout
    assert xd.Layout.from_device_mesh(mesh_2x4) != torch.strided  # of no tensor yet


def test_torch_asks_for_it(mesh_2x4):
    value = torch.randn(8, 4, dtype=torch.float64)
    mask = value > 0
    x, m = (xd.distribute_tensor(v, mesh_2x4, [xd.Shard(0), xd.Shard(1)]) for v in (value, mask))
    for name in ("sum", "mean", "softmax", "amax", "var"):
        found = getattr(torch.masked, name)(x, 1, mask=m)
        torch.testing.assert_close(
            found.full_tensor().cpu(),
            getattr(torch.masked, name)(value, 1, mask=mask),
            equal_nan=True,
        )
    x = x[:2].detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: (t * t).sum(), (x,))
