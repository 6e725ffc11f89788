"""Composites of views reach the dispatcher whole where autograd isn't there to take them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.narrow(0, 1, 2),
    lambda x: x.reshape(2, 8)[1],
    lambda x: x.contiguous(),
    lambda x: x.to(torch.float32),
    lambda x: x.T,
    lambda x: x.chunk(2)[1],
    lambda x: x.tensor_split(torch.tensor([1, 3]))[1],
]


@pytest.mark.parametrize("number", range(len(VIEWS)))
def test_writes_reach_the_tensor_in_inference_mode(number: int, mesh_2x4: DeviceMesh) -> None:
    plain = torch.arange(16.0).view(4, 4)
    with torch.inference_mode():
        ours = distribute_tensor(plain.clone(), mesh_2x4, [Shard(0), Replicate()])
        VIEWS[number](ours).fill_(-1)
        VIEWS[number](plain).fill_(-1)
    torch.testing.assert_close(ours.full_tensor().cpu(), plain)


def test_writes_through_views_below_a_custom_op() -> None:
    @torch.library.custom_op("xla_dtensor_tests::fill_part", mutates_args=())
    def fill_part(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        out.narrow(0, 1, 2).copy_(x.narrow(0, 0, 2))
        torch.mul(x[0], 2, out=out[3])
        return out

    @fill_part.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    x = torch.randn(4, 3)
    torch.testing.assert_close(fill_part(x.to("xla")).cpu(), fill_part(x))


FACTOR = [1.0]


@torch.library.custom_op("xla_dtensor_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR[0]


scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, grad: grad * FACTOR[0])


@torch.library.custom_op("xla_dtensor_tests::shifted_", mutates_args={"x"})
def shifted_(x: torch.Tensor) -> None:
    x.add_(FACTOR[0])


LIBRARY = torch.library.Library("xla_dtensor_tests", "FRAGMENT")
LIBRARY.define("by_hand(Tensor x) -> Tensor")
LIBRARY.impl("by_hand", lambda x: x * FACTOR[0], "CompositeExplicitAutograd")


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(scaled(x).square().sum(), x)
    return grad


def in_place(x: torch.Tensor) -> torch.Tensor:
    written = x.clone()
    shifted_(written[:, 1:])
    return written


KERNELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "result": lambda x: scaled(x),
    "gradient": with_gradient,
    "in place": in_place,
    "by hand": lambda x: torch.ops.xla_dtensor_tests.by_hand(x),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda function: function,
    "compiled": xd.compile,
    "replay": lambda function: xd.compile(function, watch="replay"),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_kernel_reads_is_read_in_each_call(
    way: str, kernel: str, mesh_2x4: DeviceMesh
) -> None:
    """Somebody's Python isn't a function of its arguments alone."""
    if (kernel, way) == ("by hand", "compiled"):
        pytest.skip("docs/compile.md: what Library.impl is given isn't watched")
    plain = torch.arange(16.0).view(4, 4)
    ours = distribute_tensor(plain, mesh_2x4, [Shard(0), Replicate()])
    function = WAYS[way](KERNELS[kernel])
    for FACTOR[0] in (2.0, 3.0, 2.0):
        got, want = function(ours), KERNELS[kernel](plain)
        torch.testing.assert_close(got.full_tensor().cpu(), want)
        assert got.placements == (Shard(0), Replicate())


def test_tensor_split_by_a_tensor_of_the_mesh(mesh_2x4: DeviceMesh) -> None:
    x, at = torch.randn(6, 2), torch.tensor([1, 4])
    ours = distribute_tensor(x, mesh_2x4, [Shard(0), Replicate()])
    where = distribute_tensor(at, mesh_2x4, [Replicate(), Replicate()])
    for actual, expected in zip(ours.tensor_split(where), x.tensor_split(at), strict=True):
        torch.testing.assert_close(actual.full_tensor().cpu(), expected)


READS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.sum().item(),
    lambda x: bool(x.sum() > 0),
    lambda x: float(x[1, 1]),
    lambda x: int(x[1, 1]),
    lambda x: x.sum().is_nonzero(),
    lambda x: [1, 2][x.argmin().item() % 2],
    lambda x: torch.allclose(x, x + 1),
    lambda x: torch.equal(x, x),
    lambda x: x.tolist(),
    lambda x: "yes" if x.any() else "no",
    lambda x: x.isfinite().all().item(),
    lambda x: range(5)[x[0, 3].long()],
]


@pytest.mark.parametrize("number", range(len(READS)))
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_values_are_read(mode: Any, number: int, mesh_2x4: DeviceMesh) -> None:
    with mode():
        plain = torch.arange(16.0).view(4, 4)
        for ours in (distribute_tensor(plain, mesh_2x4, [Shard(0), Replicate()]), plain.to("xla")):
            assert READS[number](ours) == READS[number](plain)
