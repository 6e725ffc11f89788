"""Programs that XLA doesn't compile as they are first written (`input_layouts.apart`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.compilation.program import input_layouts


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the operations are that were taken apart, of each attempt."""
    found: list[Any] = []
    apart = input_layouts.apart

    def note(lowered: Any, cutting: Any) -> Any:
        found.append(cutting)
        return apart(lowered, cutting)

    monkeypatch.setattr(input_layouts, "apart", note)
    return found


def test_two_layouts_of_an_uneven_weight(tried: list[Any]) -> None:
    # Seed 1085 of the fuzzer: residuals want the weight whole, the product its out channels.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, 4, 1, generator=generator)
    weight = torch.randn(4, 3, 3, 1, generator=generator, requires_grad=True)
    convolve = lambda x, weight: F.conv2d(x, weight, groups=2).tensor_split(2, -1)[0]
    mesh = make_mesh("4x2")
    placed = distribute_tensor(weight.detach(), mesh, [Partial("avg"), Shard(2)])
    placed.requires_grad_()
    out = xd.compile(convolve, layouts="torch")(
        distribute_tensor(x, mesh, [Replicate()] * 2), placed
    )
    out.sum().backward()
    wanted = convolve(x, weight)
    wanted.sum().backward()
    assert tried, "XLA compiles it by now"
    torch.testing.assert_close(out.detach().cpu(), wanted.detach())
    torch.testing.assert_close(placed.grad.cpu(), weight.grad)


def test_two_tensors_of_one_element(tried: list[Any]) -> None:
    # Seed 382: what is cut out of the padding of one meets what is cut out of the other's.
    mesh = make_mesh("2x4")

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.lerp_(y, 0.25)
        out = torch.atan2(x, torch.maximum(y.square(), y))
        if out.device.type == "xla":
            out = out.redistribute(placements=[Replicate(), Shard(2)])
        return out.clone()

    x, y = torch.full((1, 1, 1), -0.5), torch.full((1, 1, 1), 1.5)
    placed = distribute_tensor(x, mesh, [Shard(0), Replicate()])
    other = distribute_tensor(y, mesh, [_StridedShard(1, split_factor=4), Shard(1)])
    out = xd.compile(step, layouts="torch")(placed, other)
    assert tried, "XLA compiles it by now"
    torch.testing.assert_close(out.cpu(), step(x, y))
    torch.testing.assert_close(placed.cpu(), x)


def test_a_product_that_is_looked_up_in() -> None:
    # Seed 11302, with a backward pass outside.
    mesh = make_mesh("2x2x2")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 2, 1, generator=generator)
    x = torch.randn(3, 2, 3, generator=generator, requires_grad=True)
    index = torch.tensor([2, 0, 1, 2, 2, 0, 1, 2, 2, 0, 0, 0])

    def step(weight: torch.Tensor, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, weight).index_select(2, index).mT.reshape([3, 1, 36])

    placed = distribute_tensor(x.detach(), mesh, [Shard(1), Replicate(), Replicate()])
    placed.requires_grad_()
    got = xd.compile(step)(
        distribute_tensor(weight, mesh, [Shard(2), Replicate(), Shard(2)]),
        distribute_tensor(index, mesh, [Shard(0), Replicate(), Shard(0)]),
        placed,
    )
    wanted = step(weight, index, x)
    got.sin().sum().backward()
    wanted.sin().sum().backward()
    torch.testing.assert_close(got.detach().cpu(), wanted.detach())
    torch.testing.assert_close(placed.grad.cpu(), x.grad)


def test_one_position_of_an_uneven_tensor(tried: list[Any]) -> None:
    # Seed 12847: a gather of one position, which XLA makes a slice, beside a grouped convolution.
    mesh = make_mesh("2x2x2")
    x = torch.tensor([0.375, 1.75], dtype=torch.bfloat16)
    image = torch.randn(1, 6, 1, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.randn(4, 3, 1, generator=torch.Generator().manual_seed(1))

    def step(x: torch.Tensor, image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        loss = x.sum() + x[-2].sum() + F.conv1d(image, weight, groups=2).sum()
        loss.backward()
        return loss.detach()

    whole = Replicate()
    placed = distribute_tensor(image.detach(), mesh, [whole, whole, Partial("max")])
    got = xd.compile(step, layouts="torch")(
        distribute_tensor(x, mesh, [whole, Shard(0), Shard(0)]),
        placed.requires_grad_(),
        distribute_tensor(weight, mesh, [whole, whole, Shard(1)]),
    )
    # A second attempt, with gathers hidden as well, until padding was cut off by slices.
    assert tried, "XLA compiles it by now"
    torch.testing.assert_close(got.cpu(), step(x, image, weight))
    torch.testing.assert_close(placed.grad.cpu(), image.grad)


def test_a_gradient_outside_of_rows_that_are_added_to(tried: list[Any]) -> None:
    # Seed 8801: the one row that is added to two, on three axes, gathers the gradients of both.
    base, places = torch.zeros(2, 2), torch.tensor([0, 1])
    row = torch.tensor([[0.5, -2.0]], requires_grad=True)
    step = lambda base, places, row: base.index_put((places,), row, accumulate=True).sin().sum()
    step(base, places, row).backward()
    mesh = make_mesh("2x2x2")
    on_mesh = (
        distribute_tensor(base, mesh, [Replicate()] * 3),
        distribute_tensor(places, mesh, [Shard(0), Shard(0), Replicate()]),
        distribute_tensor(row.detach(), mesh, [Replicate(), Shard(0), Replicate()]),
    )
    placed = on_mesh[-1].requires_grad_()
    xd.compile(step)(*on_mesh).backward()
    assert tried, "XLA compiles it by now"
    torch.testing.assert_close(placed.grad.cpu(), row.grad)
