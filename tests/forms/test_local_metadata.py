"""Tensors that change what they are (``t_``, ``resize_``, ``set_``) or look at the memory behind
them (``as_strided``): between a sharded tensor and what its devices hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.movement.test_local_view import check, parts

R = Replicate()
LAYOUTS: list[tuple[Placement, ...]] = [
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (R, Shard(1)),
    (Shard(0), Shard(0)),
]
Change = Callable[[torch.Tensor], torch.Tensor]
CHANGES: dict[str, Change] = {
    "as_strided": lambda x: x.as_strided((2, 3), (1, 2), 1),
    "as_strided of a view": lambda x: x.t().as_strided((2, 3), (1, 2)),
    "as_strided behind an offset": lambda x: x.flatten()[3:].as_strided((2, 2), (1, 3)),
    "as_strided of as_strided": lambda x: x.as_strided((3,), (2,), 4).as_strided((2,), (5,)),
    "as_strided_": lambda x: x.as_strided_((2, 3), (1, 2), 1),
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1)[1],
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x[:1].squeeze_(0),
    "resize_ to fewer": lambda x: x.resize_(3, 2),
    "resize_ of a view": lambda x: x.flatten()[3:].resize_(2, 2),
    "resize_ to as many": lambda x: x.resize_(x.numel()),
    "resize_as_": lambda x: x.resize_as_(x[:, :2]),
    "set_": lambda x: x.set_(x.t()[1:]),
    "set_ with strides": lambda x: x.set_(x, 2, (2, 2), (1, 2)),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("placements", LAYOUTS)
@pytest.mark.parametrize("name", list(CHANGES))
def test_on_local_tensors(mesh_2x4: DeviceMesh, placements: tuple, name: str) -> None:
    """As torch does on each device's tensor; a write is seen by the sharded tensor."""
    change = CHANGES[name]
    value = torch.arange(8 * 16.0).reshape(8, 16)
    x = distribute_tensor(value, mesh_2x4, placements)
    memories = [p.contiguous().view(-1).clone() for p in parts(value, mesh_2x4, placements)]
    shape = x.to_local().shape
    result = change(x.to_local())
    expected = [change(m.view(shape)) for m in memories]
    assert result.stride() == expected[0].stride()
    assert result.storage_offset() == expected[0].storage_offset()
    check(result, expected)
    result.mul_(-1)
    for e in expected:
        e.mul_(-1)
    check(result, expected)
    assert (x.shape, x.placements) == (value.shape, placements)
    check(x.to_local(), [m.view(shape) for m in memories])


# Each gives the same of a sharded tensor as of the whole value.
OF_SHARDED: dict[str, Change] = {
    name: CHANGES[name]
    for name in ("as_strided", "as_strided of a view", "t_", "unsqueeze_", "resize_ to fewer")
}


@pytest.mark.parametrize("name", list(OF_SHARDED))
def test_on_sharded_views_of_local_tensors(mesh_2x4: DeviceMesh, name: str) -> None:
    change = OF_SHARDED[name]
    placements = (Shard(0), Shard(1))
    value = torch.arange(8 * 16.0).reshape(8, 16)
    local = distribute_tensor(value, mesh_2x4, placements).to_local().clone()
    result = change(DTensor.from_local(local, mesh_2x4, placements))
    expected = change(value)
    torch.testing.assert_close(result.full_tensor().cpu(), expected)
    result.mul_(-1)
    expected.mul_(-1)
    whole = value.as_strided((8, 16), (16, 1), 0)
    check(local, parts(whole, mesh_2x4, placements))


def test_growing(mesh_2x4: DeviceMesh) -> None:
    """Into new memory, which the sharded tensor doesn't see: refused while there is one."""
    values = [torch.randn(2, 2) for _ in range(8)]
    alone = xd.from_device_values(values, mesh_2x4)
    alone.resize_(3, 2)
    check(alone[:2], values)
    x = distribute_tensor(torch.ones(8, 16), mesh_2x4, [Shard(0), Shard(1)])
    with pytest.raises(xd.UnsupportedOpError, match=r"share the memory.*make a new tensor instead"):
        x.to_local().resize_(100)
    with pytest.raises(xd.UnsupportedOpError, match=r"share the memory.*make a new tensor instead"):
        DTensor.from_local(alone, mesh_2x4, [Shard(0), Shard(1)]).resize_(20, 20)
    whole = DTensor.from_local(alone.clone(), mesh_2x4, [Shard(0), R], run_check=True)
    before = whole.full_tensor().cpu()
    whole.resize_(7, 2)
    torch.testing.assert_close(whole.full_tensor().cpu(), torch.cat([before, torch.zeros(1, 2)]))


def test_sharded_and_local_stay_apart(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8, 16), mesh_2x4, [Shard(0), Shard(1)])
    local = torch.zeros(8, 16, device="xla")
    for call in (
        lambda: x.set_(local),
        lambda: local.set_(x),
        lambda: x.set_(local, 0, (2, 2), (1, 2)),
        lambda: setattr(x, "data", local),
        lambda: setattr(local, "data", x),
    ):
        with pytest.raises(xd.UnsupportedOpError, match=r"can't become a .* one; convert"):
            call()
    assert x.placements == (Shard(0), Shard(1)) and local.varying == ()


def test_to_local_after_the_last_one_changed(mesh_2x4: DeviceMesh) -> None:
    """`to_local` gives the tensor that it gave before, unless that has become another one."""
    x = distribute_tensor(torch.randn(8, 16), mesh_2x4, [Shard(0), Shard(0)])
    local = x.to_local()
    local.t_()
    assert (local.shape, x.to_local().shape) == ((16, 1), (1, 16))
    local = x.to_local()
    local.requires_grad_()
    assert x.to_local() is not local and not x.to_local().requires_grad
