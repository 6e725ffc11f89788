"""Running sums and the like along a sharded dim, beside each other in one program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh
from tests.lowering.test_strided import check, way  # noqa: F401

SCANS: dict[str, Any] = {
    "cumsum": lambda x, dim: x.cumsum(dim),
    "cumprod": lambda x, dim: x.cumprod(dim),
    "logcumsumexp": lambda x, dim: x.logcumsumexp(dim),
    "cummax": lambda x, dim: x.cummax(dim)[0],
    "cummin": lambda x, dim: x.cummin(dim)[0],
}


@pytest.mark.one_in(13)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13])
def test_all_of_them_of_one_tensor(length: int, way: str) -> None:  # noqa: F811
    """XLA's own windows give all of them the padding of the first."""
    program = lambda x: sum((scan(x, 0).sin().sum() for scan in SCANS.values()), x.sum())
    x = torch.randn(length, dtype=torch.float64) - 20
    check(program, x, make_mesh("2x4"), [Replicate(), Shard(0)], way)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_along_each_dim(name: str, dim: int, way: str) -> None:  # noqa: F811
    program = lambda x: (SCANS[name](x, dim) * x.sign()).sin().sum()
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    check(program, x, make_mesh("2x4"), [Shard(1), Shard(0)], way)


def test_of_a_number_that_was_repeated(way: str) -> None:  # noqa: F811
    """XLA ends the process at its window."""
    program = lambda x: x.sort(-1)[1].repeat([3, 3]).cumsum(0).sum() + x.sum()
    check(program, torch.randn(1, 1), make_mesh("8"), [Replicate()], way)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("placements", [(0, 1), (1, 1), (1, None), (None, 0), (None, None)])
@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "bfloat16", "float32", "complex64"])
def test_sums_of_each_dtype(dtype: str, placements: tuple[int | None, ...]) -> None:
    """Longer than the 32 that XLA cuts a window into, beside the sum of a constant."""
    x = (torch.arange(2 * 72).view(2, 72) * 7919 % 11 - 5).to(getattr(torch, dtype))
    mesh = make_mesh("2x4")
    where = [Replicate() if d is None else Shard(d) for d in placements]
    sums = lambda x: (x.cumsum(1), x.cumsum(0), torch.ones_like(x).cumsum(1), x.cumsum(1).cumsum(1))
    found = xd.compile(sums)(distribute_tensor(x, mesh, where))
    for mine, right in zip(found, sums(x), strict=True):
        assert mine.dtype == right.dtype
        torch.testing.assert_close(mine.full_tensor().cpu(), right)
