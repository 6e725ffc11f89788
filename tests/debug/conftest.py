from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from xla_dtensor.base import events


@pytest.fixture
def sharded(mesh_2x4: DeviceMesh) -> Callable[..., torch.Tensor]:
    """``sharded((8, 16), R, S(0))``: random numbers laid out over the mesh (dp=2, tp=4)."""
    return lambda shape, *placements: distribute_tensor(torch.randn(shape), mesh_2x4, placements)


@pytest.fixture(autouse=True)
def _nobody_looks() -> Iterator[None]:
    assert events.observer is None
    yield
    assert events.observer is None
