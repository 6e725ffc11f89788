"""Dtypes that the caller asks for, integer division, and the precision of products."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.ops.harness import close
from xla_dtensor.dispatch.execute import _plans

DTYPES = [torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.float32, torch.complex128]
WANTED = [torch.int64, torch.float16, torch.float64, torch.complex64]
REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": lambda x, dtype: x.sum(0, dtype=dtype),
    "sum_all": lambda x, dtype: x.sum(dtype=dtype),
    "prod": lambda x, dtype: x.prod(0, dtype=dtype),
    "mean": lambda x, dtype: x.mean(0, dtype=dtype),
    "cumsum": lambda x, dtype: x.cumsum(0, dtype=dtype),
    "softmax": lambda x, dtype: x.softmax(0, dtype=dtype),
}


def values(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(6, 5, dtype=dtype)
    return torch.randint(0, 5, (6, 5)).to(dtype)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize("name", list(REDUCTIONS))
def test_reductions_in_another_dtype(mesh_2x4: DeviceMesh, name: str) -> None:
    function = REDUCTIONS[name]
    for dtype in DTYPES:
        x = values(dtype)
        sharded = distribute_tensor(x, mesh_2x4, [Shard(0), Shard(1)])
        for wanted in WANTED:
            try:
                expected = function(x, wanted)
            except (RuntimeError, NotImplementedError):
                with pytest.raises(RuntimeError):
                    function(sharded, wanted)
                continue
            result = function(sharded, wanted)
            assert result.dtype == expected.dtype
            tolerance = 1e-2 if torch.float16 in (wanted, dtype) else None
            close(result.cpu(), expected, tolerance and (tolerance, tolerance))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.float32], ids=str)
def test_division(mesh_2x4: DeviceMesh, mode: str | None, dtype: torch.dtype) -> None:
    low = 1 if dtype is torch.uint8 else -9
    x = torch.randint(low, 10, (6, 5)).to(dtype)
    y = torch.tensor([-7, -2, 3, 4, 9]).abs().to(dtype) * (-1 if low < 0 else 1)
    sharded = distribute_tensor(x, mesh_2x4, [Replicate(), Shard(0)])
    other = distribute_tensor(y, mesh_2x4, [Shard(0), Replicate()])
    expected = torch.div(x, y, rounding_mode=mode)
    result = torch.div(sharded, other, rounding_mode=mode)
    assert result.dtype == expected.dtype
    close(result.cpu(), expected)
    close((sharded % other).cpu(), x % y)
    close((sharded // other).cpu(), x // y)
    close(torch.fmod(sharded, 4).cpu(), torch.fmod(x, 4))
    close(torch.div(sharded, 2.5, rounding_mode=mode).cpu(), torch.div(x, 2.5, rounding_mode=mode))


MASKED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mask * x": lambda mask, x: mask * x,
    "mask * inf": lambda mask, x: mask * math.inf,
    "float": lambda mask, x: mask.float() * x,
    "to": lambda mask, x: x * (mask.to(torch.bfloat16) + 0),
    "divided": lambda mask, x: mask.float() / (1 / x),
    "typed": lambda mask, x: mask.type_as(x) * x,
    "addcmul": lambda mask, x: torch.addcmul(x, mask.float(), x),
    "einsum": lambda mask, x: torch.einsum("i,i->i", mask.float(), x),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", list(MASKED))
def test_what_is_not_finite_shows_behind_a_mask(name: str, compiled: bool) -> None:
    """XLA makes a product with a mask a selection (`base/xla_faults.py:MASKS`)."""
    function = MASKED[name]
    mask = torch.tensor([True, False, True, False])
    x = torch.tensor([math.inf, math.nan, 2.0, -math.inf])
    run = xd.compile(function) if compiled else function
    torch.testing.assert_close(
        run(mask.to("xla"), x.to("xla")).cpu(), function(mask, x), equal_nan=True
    )


def test_precision_of_products(mesh_2x4: DeviceMesh) -> None:
    """An executable doesn't outlive a change of the setting."""
    x = distribute_tensor(torch.randn(8, 8), mesh_2x4, [Shard(0), Replicate()])
    x @ x, x + x
    count = len(_plans)
    torch.set_float32_matmul_precision("medium")
    try:
        x @ x, x + x
        assert len(_plans) == count + 1
        x @ x
        assert len(_plans) == count + 1
    finally:
        torch.set_float32_matmul_precision("highest")
