"""The largest of a dim that is sharded: each device looks at its part, and no part is gathered."""

from __future__ import annotations

import pytest
import torch

import xla_dtensor as xd
from xla_dtensor.planning.collectives import collective_traffic

INF, NAN = float("inf"), float("nan")


def rows(size: int) -> torch.Tensor:
    """Ties within a shard and between shards, infinities, NaNs."""
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (8, size)).float()
    x[0] = -INF
    x[1] = INF
    x[2, [1, size - 1]] = 9.0
    x[3, [size - 2, size // 2]] = NAN
    x[4, size - 1] = NAN
    x[5] = NAN
    x[6] = torch.arange(size)
    return x


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", [16, 13, 5, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_argmax_and_argmin(size: int, dtype: torch.dtype) -> None:
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    x = rows(size) if dtype.is_floating_point else rows(size).nan_to_num(7, 7, -7)
    x = x.to(dtype)
    for first in (xd.Replicate(), xd.Shard(1), xd.Shard(0)):
        sharded = xd.distribute_tensor(x, mesh, [first, xd.Shard(1)])

        @xd.compile
        def found(x: torch.Tensor) -> list[torch.Tensor]:
            some = [x.argmax(1), x.argmax(1, keepdim=True), x.argmax(), x.argmax(0)]
            return [*some, x.argmin(1), x.max(1).indices, x.max(1).values, x.min(1).indices]

        for ours, wanted in zip(found(sharded), found._function(x), strict=True):
            torch.testing.assert_close(ours.full_tensor().cpu(), wanted, equal_nan=True)


def test_no_part_is_gathered() -> None:
    mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("tp",))
    weight = xd.distribute_tensor(torch.randn(4096, 16), mesh, [xd.Shard(0)])
    step = xd.compile(lambda x: torch.nn.functional.linear(x, weight).argmax(-1))
    x = torch.randn(2, 16)
    found = step(xd.distribute_tensor(x, mesh, [xd.Replicate()]))
    assert torch.equal(found.full_tensor().cpu(), (x @ weight.full_tensor().cpu().T).argmax(-1))
    traffic = collective_traffic(step.compiled_programs()[-1].as_text())
    assert 0 < traffic.total_bytes < 256
