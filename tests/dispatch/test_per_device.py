"""Operations whose lowerings tell XLA's partitioner what it can't see (`lowering/_per_slice.py`):
on per-device tensors, and on sharded tensors that vary along another mesh dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import xla_dtensor as xd
from tests.movement.test_collectives import communication
from tests.movement.test_local_view import check


def pool_gradient(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    pooled = F.max_pool2d(x.reshape(-1, 2, 4, 4), 3, stride=1)
    (grad,) = torch.autograd.grad(pooled, x, pooled.detach().sin())
    return grad


# Of a tensor [8, 4, 8], each of whose slices along dim 0 is computed alone.
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "topk": lambda x: x.topk(3, -1).values,
    "topk indices": lambda x: x.topk(3, -1, largest=False).indices,
    "igamma": lambda x: torch.igamma(x.abs() + 0.5, x.abs() + 1),
    "gcd": lambda x: torch.gcd((x * 100).to(torch.int64), (x * 70).to(torch.int64)),
    "max_pool2d backward": pool_gradient,
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x.reshape(-1, 2, 4, 4)),
    "ldl": lambda x: torch.linalg.ldl_factor(x[..., :4] + x[..., :4].mT).LD,
}
VARY = {"both": ["dp", "tp"], "dp": ["dp"], "tp": ["tp"]}
PICK = {"both": range(8), "dp": [0, 0, 0, 0, 4, 4, 4, 4], "tp": [0, 1, 2, 3] * 2}


def inputs(vary: str, mesh: DeviceMesh) -> tuple[xd.XLATensor, list[torch.Tensor]]:
    distinct = [torch.randn(8, 4, 8) for _ in range(8)]
    values = [distinct[i] for i in PICK[vary]]
    return xd.from_device_values(values, mesh, VARY[vary]), values


@pytest.mark.one_in(3)
@pytest.mark.parametrize("vary", ["both", "dp"])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_on_per_device_tensors(mesh_2x4: DeviceMesh, vary: str, name: str) -> None:
    function = OPERATIONS[name]
    x, values = inputs(vary, mesh_2x4)
    expected = [function(v) for v in values]
    result = function(x)
    assert list(result.varying) == VARY[vary]
    check(result, expected)
    if vary == "both":
        compiled = xd.compile(function)
        check(compiled(x), expected)
        assert communication(compiled) == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_on_sharded_tensors_that_vary(mesh_2x4: DeviceMesh, name: str) -> None:
    """Sharded along tp and another tensor along dp: nothing is to be communicated."""
    function = OPERATIONS[name]
    x, values = inputs("dp", mesh_2x4)
    expected = [function(v) for v in values]
    for dim in (0, 1):
        sharded = DTensor.from_local(x, mesh_2x4["tp"], [Replicate()])
        sharded = sharded.redistribute(placements=[Shard(dim)])
        check(function(sharded).full_tensor(), expected)
        if dim == 0:
            compiled = xd.compile(function)
            check(compiled(sharded).full_tensor(), expected)
            assert communication(compiled) == []


@pytest.mark.parametrize("vary", list(VARY))
def test_multinomial(mesh_2x4: DeviceMesh, vary: str) -> None:
    """What can't be drawn isn't; devices that vary draw numbers of their own."""
    possible = [torch.rand(4, 512) < 0.5 for _ in range(8)]
    weights = [possible[i].float() * 3 for i in PICK[vary]]
    x = xd.from_device_values(weights, mesh_2x4, VARY[vary])
    for draw in (torch.multinomial, xd.compile(torch.multinomial)):
        drawn = draw(x, 40).local_values()
        assert x.varying == tuple(VARY[vary])
        for indices, weight in zip(drawn, weights, strict=True):
            assert (weight.gather(1, indices) > 0).all()
            assert all(len(row.unique()) == 40 for row in indices)
        for a, b in zip(drawn[1:], PICK[vary][1:], strict=True):
            assert torch.equal(a, drawn[0]) == (b == PICK[vary][0])


def test_multinomial_of_a_sharded_tensor(mesh_2x4: DeviceMesh) -> None:
    weights = [(torch.rand(8, 64) < 0.7).float() for _ in range(2)]
    x = xd.from_device_values([weights[i // 4] for i in range(8)], mesh_2x4, ["dp"])
    for dim in (0, 1):
        sharded = DTensor.from_local(x, mesh_2x4["tp"], [Replicate()])
        sharded = sharded.redistribute(placements=[Shard(dim)])
        drawn = torch.multinomial(sharded, 20).full_tensor().local_values()
        for i, indices in enumerate(drawn):
            assert (weights[i // 4].gather(1, indices) > 0).all()
            assert all(len(row.unique()) == 20 for row in indices)
        assert torch.equal(drawn[0], drawn[3]) and not torch.equal(drawn[0], drawn[4])
