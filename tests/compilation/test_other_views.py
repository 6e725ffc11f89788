"""Leaves that a compiled step sees in the other view alone: they get their gradients there, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.custom_ops import distributed_op


class Square(xd.DFunction):
    _op_name = "test_other_views.square"

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def _function(x: Any) -> Any:
    if Square._op_name not in distributed_op.OPS:
        xd.DistributedOp(Square._op_name, rule="a -> a")
    return Square.apply(x)


SQUARES: dict[str, Callable[[Any], Any]] = {
    "to_local": lambda x: x.to_local() ** 2,
    "from_local": lambda x: DTensor.from_local(x.to_local(), x.device_mesh, x.placements) ** 2,
    "full_tensor": lambda x: x.full_tensor() ** 2,
    "DFunction": _function,
    "local_map": lambda x: local_map(
        lambda own: own**2,
        out_placements=[Shard(0)],
        in_placements=([Shard(0)],),
        device_mesh=x.device_mesh,
    )(x),
    "checkpoint": lambda x: checkpoint(lambda x: x.to_local() ** 2, x, use_reentrant=False),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", list(SQUARES))
def test_gradients_of_sharded_leaves(name: str, captured: bool, own_ops: None) -> None:
    value = torch.randn(8)
    x = distribute_tensor(value, make_mesh("4"), [Shard(0)]).requires_grad_()

    def step(x: Any) -> None:
        SQUARES[name](x).sum().backward()

    compiled = xd.compile((lambda: step(x)) if captured else step)
    for count in (1, 2):
        compiled() if captured else compiled(x)
        torch.testing.assert_close(x.grad.full_tensor().cpu(), 2 * count * value)


def test_gradients_of_what_devices_hold() -> None:
    mesh = make_mesh("4")
    values = [torch.randn(3) for _ in range(4)]
    x = xd.from_device_values(values, mesh).requires_grad_()

    @xd.compile
    def step(x: Any) -> None:
        (DTensor.from_local(x, mesh, [Shard(0)]) ** 2).sum().backward()

    step(x)
    torch.testing.assert_close(x.grad.local_values(), [2 * v for v in values])
