"""Files saved before the package had floors load: they name what rebuilds by its old place."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

NEW = (b"xla_dtensor.tensors.saving", b"xla_dtensor.mesh.saving")
OLD = b"xla_dtensor._pickling"


def as_before(data: bytes) -> bytes:
    """A pickle of protocol 0 or 2 as it was written by the first versions."""
    for module in NEW:
        data = data.replace(b"c" + module + b"\n", b"c" + OLD + b"\n")
    assert OLD in data and not any(module in data for module in NEW)
    return data


@pytest.fixture
def tensor(mesh_2x4: DeviceMesh) -> Any:
    return distribute_tensor(torch.randn(8, 4), mesh_2x4, [Shard(0), Replicate()])


@pytest.mark.parametrize("protocol", [0, 2])
def test_old_pickles(tensor: Any, protocol: int) -> None:
    loaded = pickle.loads(as_before(pickle.dumps(tensor, protocol)))
    assert loaded.placements == tensor.placements and loaded.device_mesh == tensor.device_mesh
    assert torch.equal(loaded.full_tensor().cpu(), tensor.full_tensor().cpu())


def test_old_checkpoints_with_weights_only(tensor: Any) -> None:
    written, rewritten = io.BytesIO(), io.BytesIO()
    torch.save({"w": tensor}, written)
    with zipfile.ZipFile(written) as source, zipfile.ZipFile(rewritten, "w") as target:
        for item in source.infolist():
            data = source.read(item)
            target.writestr(item, as_before(data) if item.filename.endswith("data.pkl") else data)
    rewritten.seek(0)
    loaded = torch.load(rewritten)["w"]
    assert loaded.placements == tensor.placements
    assert torch.equal(loaded.full_tensor().cpu(), tensor.full_tensor().cpu())
