"""``print(x)``: torch's text of the values, and where they are."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.forms import host_values
from xla_dtensor.tensors import printing

PLACEMENTS = [
    (Shard(0), Shard(1)),
    (Replicate(), Shard(0)),
    (Shard(1), Shard(1)),
    (Replicate(),) * 2,
]
VALUES = {
    "small": torch.randn(3, 4),
    "integers": torch.arange(6).reshape(2, 3),
    "booleans": torch.tensor([[True], [False]]),
    "half": torch.randn(2, 2).bfloat16(),
    "double": torch.randn(2, 3).double(),
    "complex": torch.randn(2, 3, dtype=torch.complex64),
    "infinite": torch.tensor([[float("nan"), float("inf"), -1.0]]),
    "large": torch.randn(101, 77),
    "large numbers": torch.randn(8, 8, 80) * 1e6,
    "narrow": torch.randn(2, 3000),
    "empty": torch.zeros(0, 3),
}


def values_in(text):
    """What stands before the layout, without spaces."""
    inside = re.sub(r"\s", "", text).partition("(")[2]
    return re.split(r",(?:shape=|device|size=|requires_grad|grad_fn)", inside.rstrip(")"))[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_the_values_are_torchs(name, placements, mesh_2x4):
    value = VALUES[name]
    x = xd.distribute_tensor(value, mesh_2x4, placements)
    assert values_in(repr(x)) == values_in(repr(value))
    assert repr(x) == str(x) == f"{x}"
    assert values_in(repr(x.full_tensor())) == values_in(repr(value))


def test_the_layout_stands_beside_them(mesh_2x4):
    mesh = "device_mesh=DeviceMesh((dp=2, tp=4), 'xla', stride=(4, 1))"
    x = xd.distribute_tensor(torch.ones(2), mesh_2x4, [Shard(0), Replicate()])
    where = f"{mesh}, placements=(Shard(dim=0), Replicate())"
    assert repr(x) == f"XLAShardedTensor([1., 1.], {where})"
    assert repr(x.requires_grad_()) == f"XLAShardedTensor([1., 1.], {where}, requires_grad=True)"
    assert repr(x * 2) == f"XLAShardedTensor([2., 2.], {where}, grad_fn=<MulBackward0>)"
    assert "placements=(Partial(sum), Replicate())" in repr(x.sum())
    assert repr(x.sum()).startswith("XLAShardedTensor(2., ")
    y = torch.ones(2, device="xla")
    assert repr(y) == "XLATensor([1., 1.], device='xla:0')"
    assert repr(nn.Parameter(y)) == "XLATensor([1., 1.], device='xla:0', requires_grad=True)"
    assert repr((x.to_local() * 3).sum()).endswith("grad_fn=<SumBackward0>)")


def test_lines_are_as_wide_as_torchs(mesh_2x4):
    x = xd.distribute_tensor(torch.ones(40, 40), mesh_2x4, [Shard(0), Shard(1)])
    lines = repr(x).split("\n")
    values = [line for line in lines if "[" in line and "device_mesh" not in line]
    assert values[0].startswith("XLAShardedTensor([[1., 1., 1.,  ..., 1., 1., 1.],")
    assert all(line.startswith(" " * 18 + "[1.") for line in values[1:6])
    assert "shape=[40, 40]" in repr(x) and max(map(len, lines)) <= 90


def test_of_a_large_tensor_the_edges_leave_the_devices(mesh_2x4, monkeypatch):
    x = xd.distribute_tensor(torch.randn(400, 300), mesh_2x4, [Shard(0), Shard(1)])
    sizes, fetch = [], host_values.fetch

    def watched(array, shape):
        sizes.append(array.size)
        return fetch(array, shape)

    monkeypatch.setattr(printing, "fetch", watched)
    monkeypatch.setattr(xd.XLAShardedTensor, "cpu", lambda *args: pytest.fail())
    repr(x)
    assert sizes == [49]
    repr(x[3:].t())
    assert sizes == [49, 49]


def test_a_pending_sum_is_shown_reduced(mesh_2x4):
    local = torch.ones(2, device="xla")
    x = torch.distributed.tensor.DTensor.from_local(local, mesh_2x4, [Replicate(), Partial()])
    assert values_in(repr(x)) == "[4.,4.]"
    big = torch.ones(2000, device="xla")
    y = torch.distributed.tensor.DTensor.from_local(big, mesh_2x4, [Partial(), Shard(0)])
    assert values_in(repr(y)) == "[2.,2.,2.,...,2.,2.,2.]"


def test_torchs_print_options_count(mesh_2x4):
    value = torch.randn(20, 20)
    x = xd.distribute_tensor(value, mesh_2x4, [Shard(0), Shard(1)])
    before = torch._tensor_str.get_printoptions()
    try:
        for options in (
            {"threshold": 10},
            {"threshold": 10, "edgeitems": 1},
            {"threshold": 10, "edgeitems": 0},
            {"precision": 2},
            {"sci_mode": True, "threshold": 1},
            {"profile": "full"},
        ):
            torch.set_printoptions(**options)
            assert values_in(repr(x)) == values_in(repr(value)), options
    finally:
        torch.set_printoptions(**before)
        torch._tensor_str.PRINT_OPTS.sci_mode = None


def test_what_has_no_values_has_a_shape(mesh_2x4, capsys):
    x = xd.distribute_tensor(torch.ones(8, 4), mesh_2x4, [Shard(0), Replicate()])
    varying = "XLATensor(shape=[4, 4], dtype=torch.float32, varying along dp, device='xla:0')"
    assert repr(x.to_local()) == varying

    @xd.compile
    def step(x):
        print(repr(x))
        return x + 1

    step(x)
    printed = capsys.readouterr().out
    assert printed.startswith("XLAShardedTensor(shape=[8, 4], dtype=torch.float32, device_mesh=")
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    xd.distribute_module(layer, mesh_2x4)
    assert "shape=[4, 4]" in repr(layer.weight)


def test_printing_changes_nothing(mesh_2x4):
    x = xd.distribute_tensor(torch.randn(50, 50), mesh_2x4, [Shard(0), Shard(1)])
    x.requires_grad_()
    before = torch.xla.get_rng_state()
    loss = (x * 2).sum()
    repr(x), repr(loss)
    loss.backward()
    assert torch.equal(torch.xla.get_rng_state(), before)
    assert x.grad.full_tensor().cpu().eq(2).all()
    with torch.inference_mode():
        assert values_in(repr(x)) == values_in(repr(x.full_tensor().cpu()))
