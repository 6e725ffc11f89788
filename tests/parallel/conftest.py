"""Meshes of eight simulated devices."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd


@pytest.fixture
def mesh8() -> DeviceMesh:
    return xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))


@pytest.fixture
def mesh4() -> DeviceMesh:
    return xd.init_device_mesh("xla", (4,), mesh_dim_names=("dp",))


@pytest.fixture
def mesh_dp_tp() -> DeviceMesh:
    return xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("dp", "tp"))


@pytest.fixture
def mesh_hsdp_tp() -> DeviceMesh:
    return xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("rep", "shard", "tp"))
