"""The greatest and the least of sharded tensors, of which a NaN is both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(1),
    "max of a dim": lambda x: x.max(0).values,
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "aminmax": lambda x: torch.stack([*torch.aminmax(x)]),
    "norm": lambda x: torch.linalg.vector_norm(x, torch.inf, dim=0),
    "least norm": lambda x: torch.linalg.vector_norm(x, -torch.inf, dim=1),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_with_nans(name: str, dtype: torch.dtype, compiled: bool, mesh_2x4: DeviceMesh) -> None:
    function = FUNCTIONS[name]
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0], x[3, 4], x[3, 5], x[5] = torch.nan, -torch.inf, torch.inf, -0.0
    run = xd.compile(function) if compiled else function
    for placements in ([Shard(0), Shard(1)], [Shard(1), Replicate()], [Replicate(), Shard(0)]):
        found = run(distribute_tensor(x, mesh_2x4, placements))
        torch.testing.assert_close(found.full_tensor().cpu(), function(x), equal_nan=True)


@pytest.mark.parametrize("reduce_op", ["max", "min"])
def test_pending(reduce_op: str, mesh_2x4: DeviceMesh) -> None:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    x[0, 0] = torch.nan
    one = distribute_tensor(x, mesh_2x4, [Shard(0), Replicate()])
    local = getattr(one.to_local(), f"a{reduce_op}")(0)
    pending = xd.XLAShardedTensor.from_local(local, mesh_2x4, [Partial(reduce_op), Replicate()])
    expected = getattr(x, f"a{reduce_op}")(0)
    torch.testing.assert_close(pending.full_tensor().cpu(), expected, equal_nan=True)
