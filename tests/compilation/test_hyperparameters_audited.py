"""An audit finds what hooks do otherwise by what isn't watched, and nothing else."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim
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


def lr() -> torch.Tensor:
    return torch.tensor(0.05)


# Of each optimizer of torch's what its first step does otherwise than the later ones, and where
# its numbers are asked for.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "loop": {"foreach": False},
    "fused": {"fused": True},
    "decay": {"weight_decay": 0.1, "maximize": True},
    "capturable": {"capturable": True},
    "lr_tensor": {"lr": lr, "foreach": False},
    "amsgrad": {"amsgrad": True},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.5},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "centered": {"centered": True, "momentum": 0.9},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "begins_at": {"initial_accumulator_value": 0.5, "lr_decay": 0.1},
    "t0": {"t0": 2.0},
}
CLASSES: tuple[type[Optimizer], ...] = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD, optim.Adafactor),
)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (make, name)
        for make in CLASSES
        for name, options in OPTIONS.items()
        if options.keys() <= {*inspect.signature(make).parameters}
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_an_optimizer_in_which_nothing_has_changed(make: Any, name: str) -> None:
    """No audit takes a first step that makes state, or a schedule, for a change."""
    options = {key: v() if callable(v) else v for key, v in OPTIONS[name].items()}
    weight = torch.nn.Parameter(torch.ones(2, 3, device="xla"))
    bias = torch.nn.Parameter(torch.ones(3, device="xla"))
    optimizer = make([{"params": [weight]}, {"params": [bias]}], **{"lr": 0.05, **options})

    def function() -> None:
        (weight.square() + bias).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = xd.compile(function, audit=1)
    for i in range(4):
        step()
        for group in optimizer.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = 0.05 / (i + 2)
