"""Programs that XLA doesn't compile as they are first written (`input_layouts.apart`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.compilation import lowered
from xla_dtensor.compilation.input_layouts import apart


def test_two_layouts_of_an_uneven_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    # Seed 1085 of the fuzzer: residuals want the weight whole, the product its out channels.
    tried: list[Any] = []
    monkeypatch.setattr(lowered, "apart", lambda program: tried.append(program) or apart(program))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, 4, 1, generator=generator)
    weight = torch.randn(4, 3, 3, 1, generator=generator, requires_grad=True)
    convolve = lambda x, weight: F.conv2d(x, weight, groups=2).tensor_split(2, -1)[0]
    mesh = make_mesh("4x2")
    placed = distribute_tensor(weight.detach(), mesh, [Partial("avg"), Shard(2)])
    placed.requires_grad_()
    out = xd.compile(convolve)(distribute_tensor(x, mesh, [Replicate()] * 2), placed)
    out.sum().backward()
    wanted = convolve(x, weight)
    wanted.sum().backward()
    assert tried, "XLA compiles it by now"
    torch.testing.assert_close(out.detach().cpu(), wanted.detach())
    torch.testing.assert_close(placed.grad.cpu(), weight.grad)
