"""Ranks that are the eight devices of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
import xla_dtensor.horovod as hvd


@pytest.fixture
def ranks() -> Iterator[DeviceMesh]:
    """Their mesh."""
    hvd.shutdown()
    mesh = xd.DeviceMesh("xla", list(range(8)), mesh_dim_names=("rank",))
    xd.set_mesh(mesh)
    hvd.init()
    yield mesh
    hvd.shutdown()
    xd.set_mesh(None)
