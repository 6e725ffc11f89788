"""Forward-mode AD, ``torch.func`` and dual tensors, against CPU torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

# torch itself scripts decompositions for it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pointwise": lambda x: (x * x).sin() + x.exp(),
    "matmul": lambda x: x @ x.t(),
    "reduction": lambda x: x.softmax(-1).square().sum(0),
    "views": lambda x: x.t()[1:].reshape(-1) * 2,
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "index": lambda x: x[:, [0, 2]] * x[0, 1],
    "cat": lambda x: torch.cat([x, x.tanh()]),
    "in_place": lambda x: x.clone().mul_(2).add_(x),
}
PLACES: dict[str, Callable[[torch.Tensor, DeviceMesh], torch.Tensor]] = {
    "device": lambda x, mesh: x.to("xla"),
    "mesh": lambda x, mesh: distribute_tensor(x, mesh, [Shard(0), Replicate()]),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_dual_numbers(function: Any, place: Any, mesh_2x4: DeviceMesh) -> None:
    x, v = torch.randn(4, 6), torch.randn(4, 6)

    def tangent(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, v))).tangent

    actual = tangent(place(x, mesh_2x4), place(v, mesh_2x4))
    torch.testing.assert_close(actual.cpu(), tangent(x, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_jvp(function: Any) -> None:
    x, v = torch.randn(4, 6), torch.randn(4, 6)
    expected = torch.func.jvp(function, (x,), (v,))
    actual = torch.func.jvp(function, (x.to("xla"),), (v.to("xla"),))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu(), e, rtol=1e-4, atol=1e-5)


def test_a_tangent_of_another_shape() -> None:
    x = torch.ones(2, device="xla")
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="different size"):
        forward_ad.make_dual(x, torch.ones(3, device="xla"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("how", ["device", "mesh", "compiled"])
def test_embedding_with_a_maximum_norm(norm_type: float, how: str, mesh_2x4: DeviceMesh) -> None:
    """The rows that are looked up are made shorter, in place; the gradient is of those."""
    reference = torch.nn.Embedding(8, 3, max_norm=1.0, norm_type=norm_type)
    model = torch.nn.Embedding(8, 3, max_norm=1.0, norm_type=norm_type)
    model.load_state_dict(reference.state_dict())
    if how == "mesh":
        xd.distribute_module(model, mesh_2x4)
    else:
        model.to("xla")
    step = xd.compile(lambda i: model(i).detach()) if how == "compiled" else model
    for tokens in ([[1, 3], [1, 0]], [[7, 7], [3, 2]]):
        index = torch.tensor(tokens)
        place = PLACES["mesh" if how == "mesh" else "device"]
        actual, expected = step(place(index, mesh_2x4)), reference(index)
        torch.testing.assert_close(actual.detach().cpu(), expected.detach())
        torch.testing.assert_close(model.weight.detach().cpu(), reference.weight.detach())
        if how != "compiled":
            actual.square().sum().backward()
            expected.square().sum().backward()
            torch.testing.assert_close(model.weight.grad.cpu(), reference.weight.grad)
