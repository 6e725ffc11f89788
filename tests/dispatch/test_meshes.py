"""Tensors on different submeshes in one operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

import xla_dtensor as xd

R = Replicate()
Layout = tuple[str, tuple[Placement, ...]]  # the mesh's dims, the placements
LAYOUTS: list[Layout] = [
    ("dp tp", (Shard(0), Shard(1))),
    ("dp", (Shard(0),)),
    ("tp", (Shard(1),)),
    ("tp", (R,)),
    ("dp tp", (R, Shard(0))),
    ("dp", (Partial(),)),
]


@pytest.fixture
def mesh() -> DeviceMesh:
    return xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))


def laid_out(value: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> Any:
    names, placements = layout
    return distribute_tensor(value, mesh if names == "dp tp" else mesh[names], placements)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("a", LAYOUTS)
@pytest.mark.parametrize("b", LAYOUTS)
def test_sum_and_product(a: Layout, b: Layout, mesh: DeviceMesh) -> None:
    values = torch.randn(8, 4), torch.randn(8, 4)
    x, y = (laid_out(v, mesh, layout) for v, layout in zip(values, (a, b), strict=True))
    torch.testing.assert_close((x + y).full_tensor().cpu(), values[0] + values[1])
    torch.testing.assert_close((x @ y.t()).full_tensor().cpu(), values[0] @ values[1].t())


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm(foreach: bool | None, norm_type: float, mesh: DeviceMesh) -> None:
    plain, ours = [], []
    for layout in LAYOUTS:
        value, grad = torch.randn(8, 4), torch.randn(8, 4)
        plain.append(torch.nn.Parameter(value))
        plain[-1].grad = grad.clone()
        whole = layout[0], tuple(R if isinstance(p, Partial) else p for p in layout[1])
        ours.append(torch.nn.Parameter(laid_out(value, mesh, whole)))
        ours[-1].grad = laid_out(grad, mesh, layout)
    expected = torch.nn.utils.clip_grad_norm_(plain, 1.0, norm_type, foreach=foreach)
    actual: Any = torch.nn.utils.clip_grad_norm_(ours, 1.0, norm_type, foreach=foreach)
    torch.testing.assert_close(actual.full_tensor().cpu(), expected)
    for a, b in zip(ours, plain, strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad.cpu(), b.grad)


def test_gradients_land_on_their_leaves_meshes(mesh: DeviceMesh) -> None:
    values = [torch.randn(8, 4) for _ in LAYOUTS[:5]]
    plain = [v.clone().requires_grad_() for v in values]
    ours = [
        laid_out(v, mesh, layout).requires_grad_()
        for v, layout in zip(values, LAYOUTS, strict=False)
    ]
    for tensors in (plain, ours):
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total * tensor
        total.sum().backward()
    for actual, expected in zip(ours, plain, strict=True):
        assert actual.grad.device_mesh == actual.device_mesh
        assert actual.grad.placements == actual.placements
        torch.testing.assert_close(actual.grad.full_tensor().cpu(), expected.grad)


def test_a_sum_of_meshes_that_cut_the_devices_differently_raises(mesh: DeviceMesh) -> None:
    other = mesh._flatten("all")
    x = distribute_tensor(torch.ones(8, 4), mesh["tp"], [Shard(0)])
    y = distribute_tensor(torch.ones(8, 4), other, [Shard(0)])
    with pytest.raises(xd.MeshMismatchError, match="bring them together with"):
        x + y
