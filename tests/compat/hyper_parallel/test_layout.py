"""The behaviour that HyperParallel's public ``tests/ut/core/dtensor/test_layout.py`` asks for, by
the methods that those tests call."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from xla_dtensor.compat.hyper_parallel import (
    Layout,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    _build_layout,
)
from xla_dtensor.errors import PerDeviceValueError

R = Replicate()


def layout(shape: tuple[int, ...] = (2, 4), names: Any = ("dp", "mp"), ranks: Any = None) -> Layout:
    return Layout(shape, names, rank_list=ranks, init_backend=False)


def of_map(*entries: Any) -> Layout:
    made = layout()
    made.set_tensor_map(entries)
    made.tensor_map_to_placement()
    return made


# --- placement_to_tensor_map (6) ------------------------------------------------------------------


def test_of_a_tensor_without_dims() -> None:
    made = layout()
    made.set_placements([Partial("sum"), R])
    assert made.placement_to_tensor_map(0) == []
    assert made.tensor_map == () and made.partial[0] == "sum"


@pytest.mark.parametrize(
    ("placements", "ndim", "tensor_map", "names"),
    [
        ([Shard(0), R], 2, [1, -1], ("dp", "None")),
        ([Shard(1), Shard(0)], 2, [0, 1], ("mp", "dp")),
        ([Shard(0), Shard(0)], 2, [(1, 0), -1], (("dp", "mp"), "None")),
        ([Partial("sum"), Shard(0)], 2, [0, -1], ("mp", "None")),
        ([Shard(-1), R], 3, [-1, -1, 1], ("None", "None", "dp")),
        ([StridedShard(dim=0, split_factor=4), Shard(0)], 2, [(0, 1), -1], (("mp", "dp"), "None")),
    ],
)
def test_of_placements(placements: Any, ndim: int, tensor_map: Any, names: Any) -> None:
    made = layout()
    made.set_placements(placements)
    assert made.tensor_map is None
    assert made.placement_to_tensor_map(ndim) == tensor_map
    assert made.tensor_map == tuple(tensor_map) and made.alias_tensor_map == names
    assert made.partial == ["sum" if isinstance(p, Partial) else None for p in placements]


def test_of_placements_that_do_not_fit() -> None:
    made = layout((2,), ("dp",))
    made.set_placements([Shard(0)])
    with pytest.raises(ValueError, match="must be positive"):
        made.placement_to_tensor_map(-1)
    made.set_placements([Shard(5)])
    with pytest.raises(ValueError, match="2 dims"):
        made.placement_to_tensor_map(2)
    strided = layout()
    strided.set_placements([StridedShard(dim=0, split_factor=3), Shard(0)])
    with pytest.raises(ValueError, match="into 3 pieces"):
        strided.placement_to_tensor_map(2)
    with pytest.raises(ValueError, match="no placements"):
        layout().placement_to_tensor_map(2)


# --- tensor_map_to_placement (4) ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor_map", "placements"),
    [
        ((1, -1), [Shard(0), R]),
        ((0, 1), [Shard(1), Shard(0)]),
        (((1, 0),), [Shard(0), Shard(0)]),
        (((0, 1),), [_StridedShard(0, split_factor=4), Shard(0)]),
        ((-1, -1), [R, R]),
        ((), [R, R]),
    ],
)
def test_of_tensor_maps(tensor_map: Any, placements: Any) -> None:
    made = layout()
    made.set_tensor_map(tensor_map)
    assert made.placements is None
    assert made.tensor_map_to_placement() == placements == list(made.placements)
    back = layout()
    back.set_placements(placements)
    back.placement_to_tensor_map(len(tensor_map))
    assert back.tensor_map == tensor_map


def test_without_a_tensor_map() -> None:
    for call in ("tensor_map_to_placement", "repeat_num", "to_dict"):
        with pytest.raises(ValueError, match="tensor_map"):
            getattr(layout(), call)()


def test_what_is_pending_is_in_the_placements() -> None:
    made = of_map(1, -1)
    made.set_partial_by_dev_axis("mp", "max")
    assert made.tensor_map_to_placement() == [Shard(0), Partial("max")]


# --- what is pending (3 + 3) ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "torchs"), [("sum", "sum"), ("avg", "avg"), ("prod", "product"), ("min", "min")]
)
def test_setting_a_reduction(op: str, torchs: str) -> None:
    made = of_map(-1, -1)
    made.set_partial_by_dev_axis("dp", op)
    assert made.partial == [op, None] and made.get_partial_by_dev_id("dp") == op
    assert made.placements == (Partial(torchs), R) and made.is_partial()
    made.set_partial_by_dev_axis("dp", None)
    assert not made.is_partial() and made.placements == (R, R)


def test_reductions_that_can_not_be() -> None:
    made = of_map(1, -1)
    for op in ("invalid_op", "all"):
        with pytest.raises(ValueError, match="Partial op must be one of"):
            made.set_partial_by_dev_axis("mp", op)
    with pytest.raises(ValueError, match="must be replicate"):
        made.set_partial_by_dev_axis("dp", "sum")
    with pytest.raises(KeyError, match="'pp'"):
        made.set_partial_by_dev_axis("pp", "sum")
    assert made.placements == (Shard(0), R)  # as it was


def test_resetting() -> None:
    made = of_map(-1)
    made.set_partial_by_dev_axis("dp", "sum")
    made.reset_partial()
    assert not made.is_partial() and made.partial == [None, None] and made.placements == (R, R)


def test_a_new_layout_has_nothing_pending() -> None:
    made = of_map(-1, -1)
    made.set_partial_by_dev_axis("dp", "sum")
    assert not made("None", "mp").is_partial() and made.is_partial()
    assert made(Partial(), R, ndim=1).is_partial()


# --- splits (5 + 4 + 3 + 3) -----------------------------------------------------------------------


def test_numbers_of_pieces() -> None:
    made = layout()("dp", "None")
    assert [made.get_dim_split_num(dim) for dim in range(3)] == [2, 1, 1]
    assert layout()(("dp", "mp"), "None").get_dim_split_num(0) == 8
    assert layout().get_dim_split_num(0) == 1


def test_which_piece_is_anothers_on_each_device() -> None:
    made = layout()("dp", "None")
    assert made.get_split_id(1) == 0 and layout().get_split_id(0) == 0
    for split in (made, layout()(("dp", "mp"), "None")):
        with pytest.raises(PerDeviceValueError, match="axis_index"):
            split.get_split_id(0)


def test_repetitions() -> None:
    assert of_map(1, -1).repeat_num() == 4
    assert of_map((1, 0)).repeat_num() == 1
    assert of_map(-1).repeat_num() == 8


def test_which_dim_a_mesh_dim_shards() -> None:
    made = layout()("dp", "None")
    assert made.is_dev_axis_apply_shard("dp") and not made.is_dev_axis_apply_shard("mp")
    both = layout()("dp", "mp")
    assert both.get_dev_axis_apply_shard_axis("dp") == 0
    assert both.get_dev_axis_apply_shard_axis("mp") == 1
    assert made.get_dev_axis_apply_shard_axis("mp") is None
    assert layout()(("mp", "dp")).get_dev_axis_apply_shard_axis("dp") == 0


def test_global_shape() -> None:
    assert layout()("dp", ("mp",)).get_global_shape((4, 2)) == (8, 8)


# --- texts (3 + 2) and equality (5) ---------------------------------------------------------------


def test_texts() -> None:
    text = of_map(1, -1).to_string()
    assert "Mesh shape: (2, 4)" in text and "Tensor Map: ('dp', 'None')" in text
    assert "Not configured" in layout().to_string()
    assert "('dp', 'mp')" in of_map((1, 0)).to_string()
    assert "Layout Configuration" in str(layout()) and "Layout" in repr(layout())
    assert isinstance(layout().compact_str, str)


def test_equality() -> None:
    assert layout((2,), ("dp",)) != "not_a_layout"
    assert layout((2,), ("dp",)) != layout((4,), ("dp",))
    assert layout((2,), ("dp",)) == layout((2,), ("dp",))
    assert layout((2,), ("dp",)) != layout((2,), ("tp",))
    assert of_map(1, -1) == of_map(1, -1) != layout() and of_map(1, -1) != of_map(-1, 1)
    assert layout() != layout(ranks=(7, 6, 5, 4, 3, 2, 1, 0))
    pending = of_map(-1)
    pending.set_partial_by_dev_axis("dp", "sum")
    assert pending != of_map(-1)


def test_equality_with_what_a_tensor_says() -> None:
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "mp"))
    x = xd.distribute_tensor(torch.ones(8, 4), mesh, [Shard(0), R])
    assert x.layout == of_map(1, -1) and of_map(1, -1) == x.layout != of_map(1)
    assert x.layout == _build_layout(mesh, (Shard(0), R), 2) and layout() != x.layout
    assert x.layout.mesh_shape == (2, 4) and x.layout.alias_name == ("dp", "mp")
    assert x.layout.rank_list == tuple(range(8)) and x.layout.repeat_num() == 4
    assert x.layout.to_dict()["tensor_map"] == (1, -1)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = x.layout.nothing


# --- calls (3), properties (7), copies, from a mesh, to_dict --------------------------------------


def test_calls() -> None:
    made = layout()
    assert made("dp", "mp").tensor_map == (1, 0)
    assert made(Shard(0), R).placements == made([Shard(0), R]).placements == (Shard(0), R)
    assert made.tensor_map is None  # it stays empty
    for wrong in (("pp", "None"), ("dp", "dp")):
        with pytest.raises(ValueError, match=r"not found|more than once"):
            made(*wrong)


def test_properties() -> None:
    made = layout()
    assert made.mesh.shape == made.mesh_shape == (2, 4) and made.alias_name == ("dp", "mp")
    assert made.rank_list == tuple(range(8))
    made.rank_list = (7, 6, 5, 4, 3, 2, 1, 0)
    made.update_mesh()
    assert made.mesh.mesh.flatten().tolist() == list(made.rank_list) == list(range(8))[::-1]
    assert layout()(("dp", "mp")).alias_placements == (("dp", "mp"),)
    assert layout()("dp", "None").alias_placements == [Shard(0), R]


def test_copies() -> None:
    made = of_map(1, -1)
    made.set_partial_by_dev_axis("mp", "sum")
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other == made and other is not made and other.tensor_map == (1, -1)
        other.reset_partial()
        assert made.is_partial()


def test_from_a_mesh() -> None:
    made = Layout.from_device_mesh(layout().mesh)
    assert made.mesh_shape == (2, 4) and made.tensor_map is None and isinstance(made, Layout)


def test_as_a_dict() -> None:
    assert of_map(1, -1).to_dict() == {
        "mesh_shape": (2, 4),
        "tensor_map": (1, -1),
        "interleaved_parallel": False,
        "alias_name": ("dp", "mp"),
        "rank_list": tuple(range(8)),
    }
