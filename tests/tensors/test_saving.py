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


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("where", [None, "cpu"])
def test_marks_on_parameters_are_saved(
    where: str | None, weights_only: bool, mesh_2x4: DeviceMesh
) -> None:
    layer = torch.nn.Linear(4, 4)
    layer.weight.lr_scale = 0.5  # type: ignore[assignment]
    layer.to("xla")
    sharded = torch.nn.Parameter(
        distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()])
    )
    sharded.tag = ("head", 3)  # type: ignore[attr-defined]
    file = io.BytesIO()
    torch.save([layer.weight, sharded, layer.bias], file)
    file.seek(0)
    weight, other, bias = torch.load(file, map_location=where, weights_only=weights_only)
    assert (weight.lr_scale, other.tag) == (0.5, ("head", 3))
    assert all(isinstance(p, torch.nn.Parameter) for p in (weight, other, bias))
    assert all(p.device.type == (where or "xla") for p in (weight, other, bias))
    assert not {"lr_scale", "tag", "_kept"} & set(vars(bias))
    assert pickle.loads(pickle.dumps(other)).tag == ("head", 3)
