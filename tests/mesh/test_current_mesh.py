"""`set_mesh`: what functions of ours and of torch do that are given no mesh."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import xla_dtensor as xd
from tests.conftest import make_mesh


@pytest.fixture(autouse=True)
def _none() -> Iterator[None]:
    yield
    xd.set_mesh(None)


def mesh_of_call(name: str) -> DeviceMesh:
    rows = [dt.Shard(0)]
    calls: dict[str, Any] = {
        "distribute_tensor": lambda: xd.distribute_tensor(torch.ones(8), placements=rows),
        "torch's distribute_tensor": lambda: dt.distribute_tensor(torch.ones(8), placements=rows),
        "distribute_module": lambda: xd.distribute_module(nn.Linear(8, 8)).weight,
        "zeros": lambda: dt.zeros(8, placements=rows),
        "from_local": lambda: dt.DTensor.from_local(torch.ones(8), placements=[dt.Replicate()]),
        "parallelize_module": lambda: (
            parallelize_module(nn.Linear(8, 8), parallelize_plan=ColwiseParallel()).weight
        ),
        "fully_shard": lambda: xd.fully_shard(nn.Linear(8, 8)).weight,
        "get_mesh": lambda: None,
    }
    result = calls[name]()
    return xd.get_mesh() if result is None else result.device_mesh


@pytest.mark.parametrize(
    "name",
    [
        "distribute_tensor",
        "torch's distribute_tensor",
        "distribute_module",
        "zeros",
        "from_local",
        "parallelize_module",
        "fully_shard",
        "get_mesh",
    ],
)
def test_functions_without_a_mesh(name: str) -> None:
    mesh, other = make_mesh("8"), make_mesh("4")
    xd.set_mesh(mesh)
    assert mesh_of_call(name) == mesh
    with other:
        assert mesh_of_call(name) == other
    assert mesh_of_call(name) == mesh
    xd.set_mesh(other)
    assert mesh_of_call(name) == other


def test_without_one() -> None:
    with pytest.raises(xd.MeshError, match=r"set_mesh\(mesh\), or use `with mesh:`"):
        xd.get_mesh()
    with pytest.raises(RuntimeError, match="No device mesh is currently active"):
        dt.zeros(8)
    for wrong in ("xla", 3):
        with pytest.raises(xd.MeshError, match="give a mesh of init_device_mesh"):
            xd.set_mesh(wrong)  # type: ignore[arg-type]


def test_all_threads_have_it() -> None:
    mesh = make_mesh("8")
    xd.set_mesh(mesh)
    found = []
    thread = threading.Thread(target=lambda: found.append(xd.get_mesh()))
    thread.start()
    thread.join(60)
    assert found == [mesh]


def test_a_compiled_step_sees_which() -> None:
    step = xd.compile(lambda x: xd.distribute_tensor(x, placements=[dt.Shard(0)]) * 2)
    x = torch.ones(8, device="xla")
    meshes = make_mesh("8"), xd.init_device_mesh("xla", (8,), mesh_dim_names=("other",))
    for mesh in (*meshes, *meshes):
        xd.set_mesh(mesh)
        assert step(x).device_mesh == mesh
    assert step.traces == 2
