"""The devices' time by module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd


class Model(nn.Module):
    """Two layers alike, and one that takes most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.wide = nn.Linear(32, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.wide(x)


def test_modules(mesh_2x4: DeviceMesh, tmp_path: Path) -> None:
    model = Model()
    xd.distribute_module(model, mesh_2x4)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = xd.compile(step)
    x = xd.distribute_tensor(torch.randn(256, 32), mesh_2x4, [xd.Shard(0), xd.Replicate()])
    for _ in range(2):
        step(x)
    with xd.metrics.profile(step, folder=tmp_path) as profile:
        for _ in range(3):
            step(x)
    found = {(row.module, row.part) for row in profile.rows}
    assert {("wide", "forward"), ("wide", "backward"), ("layers.*", "backward")} <= found
    assert ("optimizer", "optimizer") in found
    # One product in the forward pass, once in each call on each device.
    of_wide = [r for r in profile.rows if (r.module, r.part) == ("wide", "forward")]
    assert max(row.times for row in of_wide) == 3 * 8
    by_module = {
        name: sum(r.seconds for r in profile.rows if r.module == name) for name, _ in found
    }
    assert by_module["wide"] > by_module["layers.*"]
    assert profile.seconds == pytest.approx(sum(by_module.values()))
    assert "wide (backward)" in str(profile)
    assert profile.folder == tmp_path and list(tmp_path.rglob("*.xplane.pb"))


def test_two_in_turn() -> None:
    """The trace of the one isn't that of the other; without a folder none stays."""
    layer = nn.Linear(64, 64).to("xla")
    step = xd.compile(lambda x: layer(x).sum())
    x = torch.ones(64, 64, device="xla")
    step(x).item()  # it has run before the first profile begins
    found = []
    for times in (1, 4):
        with xd.metrics.profile(step) as profile:
            kept = [step(x) for _ in range(times)]
        assert len(kept) == times
        found.append({(r.module, r.operation): r.times for r in profile.rows})
        assert profile.folder is None
    once, four_times = found
    assert any(module for module, _ in once)
    assert four_times == {key: 4 * times for key, times in once.items()}


def test_what_is_no_step() -> None:
    with pytest.raises(TypeError, match=r"what xd\.compile has returned"), xd.metrics.profile(abs):
        pass  # type: ignore[arg-type]
