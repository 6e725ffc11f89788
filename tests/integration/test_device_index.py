"""``xla:3``: torch sees one device, and an index of another one is refused, not forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd


def in_context(device: str) -> torch.Tensor:
    with torch.device(device):
        return torch.ones(2)


MAKERS: dict[str, Callable[[str], Any]] = {
    "zeros": lambda device: torch.zeros(2, device=device),
    "arange": lambda device: torch.arange(3, device=device),
    "tensor": lambda device: torch.tensor([1.0], device=device),
    "rand": lambda device: torch.rand(2, device=device),
    "to": lambda device: torch.ones(2).to(device),
    "to_device": lambda device: torch.ones(2).to(device=torch.device(device)),
    "from_xla": lambda device: torch.ones(2, device="xla").to(device),
    "like": lambda device: torch.zeros_like(torch.ones(2, device="xla"), device=device),
    "new": lambda device: torch.ones(2, device="xla").new_zeros(3, device=device),
    "module": lambda device: nn.Linear(2, 2).to(device).weight,
    "made_there": lambda device: nn.Linear(2, 2, device=device).weight,
    "context": in_context,
    "compiled": lambda device: xd.compile(lambda x: x + torch.ones(2, device=device))(
        torch.ones(2, device="xla")
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_only_the_one_there_is(make: Callable[[str], Any]) -> None:
    for device in ("xla", "xla:0"):
        assert make(device).device == torch.device("xla:0")
    for device in ("xla:1", "xla:99"):
        with pytest.raises(xd.UnsupportedOpError, match=f"no device {device}.*mesh"):
            make(device)


def test_the_present_device() -> None:
    torch.xla.set_device(0)
    torch.xla.set_device("xla")
    with torch.xla.device(0):
        assert torch.xla.current_device() == 0
    for wrong in (1, "xla:7", torch.device("xla:2")):
        with pytest.raises(xd.UnsupportedOpError, match="no device"):
            torch.xla.set_device(wrong)
        with pytest.raises(xd.UnsupportedOpError, match="no device"):
            torch.xla.device(wrong)
