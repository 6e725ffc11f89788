"""``linalg__powsum`` and its list form, which newer versions of torch clip gradients by."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard, distribute_tensor

aten = torch.ops.aten


@pytest.mark.skipif(not hasattr(aten, "linalg__powsum"), reason="this version of torch lacks it")
@pytest.mark.parametrize("ord", [0, 1, 2, 3, 2.5])
def test_sums_of_powers(mesh_2x4: DeviceMesh, ord: float) -> None:
    start = torch.randn(8, 4)
    x = distribute_tensor(start, mesh_2x4, [Shard(0), Shard(1)])
    for rest in ((), ([0],), ([1], True)):
        result, expected = (aten.linalg__powsum(t, ord, *rest) for t in (x, start))
        torch.testing.assert_close(result.full_tensor().cpu(), expected)
    assert aten.linalg__powsum(x, ord).placements == (Partial("sum"), Partial("sum"))
    (result,) = aten._foreach_powsum.Scalar([x], ord)
    torch.testing.assert_close(result.full_tensor().cpu(), aten.linalg__powsum(start, ord))
