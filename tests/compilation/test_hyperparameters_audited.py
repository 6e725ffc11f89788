"""An audit finds what hooks do otherwise by what isn't watched, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import xla_dtensor as xd


def factor_of(path: Path) -> float:
    return float(path.read_text())


def constant(group: dict[str, Any], factor: float) -> None:
    group["lr"] = factor


def scaled(group: dict[str, Any], factor: float) -> None:
    group["lr"] *= factor


def decided(group: dict[str, Any], factor: float) -> None:
    if group["lr"] > factor / 100:
        group["weight_decay"] = 0.0


def kept(group: dict[str, Any], factor: float) -> None:
    group["note"] = factor


@pytest.mark.parametrize("edit", [constant, scaled, decided, kept])
@pytest.mark.parametrize("where", ["pre", "post"])
def test_a_hook_that_reads_a_file(tmp_path: Path, where: str, edit: Any) -> None:
    path = tmp_path / "factor"
    path.write_text("0.5")
    weight = torch.nn.Parameter(torch.ones(2, device="xla"))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        edit(optimizer.param_groups[0], factor_of(path))

    getattr(optimizer, f"register_step_{where}_hook")(hook)

    def function() -> None:
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = xd.compile(function, audit=1)
    for _ in range(3):
        step()
        optimizer.param_groups[0]["lr"] = 0.1
    path.write_text("0.25")
    before = weight.detach().cpu().clone()
    with pytest.raises(xd.StaleStepError, match="is stale"):
        step()
    assert torch.equal(weight.detach().cpu(), before)
