"""Files written at commit 53c542d, before modules were moved, load: pickles name modules."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from tests.checkpoint.written_before.write import PLACEMENTS, START, trained

WRITTEN = Path(__file__).parent / "written_before"
LOADS: dict[str, Any] = {
    "torch.load": lambda: torch.load(WRITTEN / "state.pt"),
    "torch.load of objects": lambda: torch.load(WRITTEN / "state.pt", weights_only=False),
    "pickle": lambda: pickle.loads((WRITTEN / "tensors.pickle").read_bytes()),
}


@pytest.mark.parametrize("way", LOADS)
def test_tensors(mesh_2x4: DeviceMesh, way: str) -> None:
    found = LOADS[way]()
    assert found["mesh"] == mesh_2x4
    for name, placements in (
        ("sharded", (Shard(0), Shard(1))),
        ("uneven", (Replicate(), Shard(1))),
        ("parameter", (Shard(1), Replicate())),
    ):
        assert found[name].placements == placements
        assert torch.equal(found[name].full_tensor().detach().cpu(), START)
    assert isinstance(found["parameter"], torch.nn.Parameter)
    assert found["single"].device.type == "xla" and found["single"].dtype == torch.bfloat16
    assert torch.equal(found["single"].cpu(), START.bfloat16())


def assert_as_trained(model: Any, optimizer: Any) -> None:
    expected, of_expected = trained(None, {})
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor().detach().cpu(), theirs.detach())
        mine, other = optimizer.state[ours], of_expected.state[theirs]
        assert mine.keys() == other.keys()
        for key, value in other.items():
            got = mine[key]
            got = got.full_tensor() if hasattr(got, "full_tensor") else got
            torch.testing.assert_close(got.cpu(), value)


def test_states_of_models_and_optimizers(mesh_2x4: DeviceMesh) -> None:
    found = torch.load(WRITTEN / "state.pt")
    model, optimizer = trained(mesh_2x4, PLACEMENTS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert_as_trained(model, optimizer)


@pytest.mark.parametrize("placements", [PLACEMENTS, {"weight": [Shard(1), Shard(0)], "bias": []}])
def test_a_managed_checkpoint(
    mesh_2x4: DeviceMesh, tmp_path: Path, placements: dict[str, Any]
) -> None:
    """In the layout that it was written in, and in another one."""
    folder = tmp_path / "managed"
    shutil.copytree(WRITTEN / "managed", folder)
    model, optimizer = trained(mesh_2x4, {n: p or [Replicate()] * 2 for n, p in placements.items()})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with xd.checkpoint.CheckpointManager(
        folder, {"model": model, "optimizer": optimizer}
    ) as manager:
        assert manager.restore() == 7
    assert_as_trained(model, optimizer)
