"""Lazy modules moved to the device, made there, copied and moved back before their first batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import xla_dtensor as xd


def model(device: str | None = None) -> nn.Module:
    return nn.Sequential(
        nn.LazyLinear(4, device=device), nn.LazyBatchNorm1d(device=device), nn.LazyLinear(2)
    )


def in_context() -> nn.Module:
    with torch.device("xla"):
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


WAYS = {
    "moved": lambda: model().to("xla"),
    "made there": lambda: model("xla").to("xla"),
    "in a context": in_context,
    # torch itself copies no uninitialized buffers.
    "copied": lambda: copy.deepcopy(
        nn.Sequential(nn.LazyLinear(4), nn.BatchNorm1d(4), nn.LazyLinear(2)).to("xla")
    ),
    "moved twice": lambda: model().to("xla").cpu().to("xla"),
    "another dtype": lambda: model().to("xla").double().float(),
    "with the method": lambda: model().xla(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_training(way: str) -> None:
    lazy = WAYS[way]()
    optimizer = torch.optim.SGD(lazy.parameters(), lr=0.1) if way == "moved" else None
    x = torch.randn(8, 3)
    lazy(x.to("xla"))
    assert {p.device.type for p in lazy.parameters()} == {"xla"}
    assert {b.device.type for b in lazy.buffers()} == {"xla"}
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in lazy.parameters())
    assert type(lazy[0]) is nn.Linear and lazy[0].weight.shape == (4, 3)
    expected = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    expected.load_state_dict({k: v.cpu() for k, v in lazy.state_dict().items()})
    optimizer = optimizer or torch.optim.SGD(lazy.parameters(), lr=0.1)
    other = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        losses = []
        for each, step, batch in ((lazy, optimizer, x.to("xla")), (expected, other, x)):
            loss = each(batch).pow(2).mean()
            loss.backward()
            step.step()
            step.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_back_on_the_cpu() -> None:
    lazy = model().to("xla").cpu()
    lazy(torch.randn(8, 3))
    assert {p.device.type for p in lazy.parameters()} == {"cpu"}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_double_precision_is_kept() -> None:
    lazy = nn.LazyLinear(4).to("xla", torch.float64)
    lazy(torch.randn(8, 3, dtype=torch.float64, device="xla"))
    assert lazy.weight.dtype is torch.float64 and lazy.weight.device.type == "xla"


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_state_dict_tells_the_shape() -> None:
    lazy = nn.LazyLinear(4).to("xla")
    values = nn.Linear(3, 4).state_dict()
    lazy.load_state_dict(values)
    assert lazy.weight.device.type == "xla" and torch.equal(lazy.weight.cpu(), values["weight"])


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_another_device_is_refused() -> None:
    with pytest.raises(xd.UnsupportedOpError, match="there is no device xla:1"):
        nn.LazyLinear(4, device="xla:1")


def test_they_are_distributed_after_a_batch() -> None:
    """Before, their parameters came out empty, and the first batch failed somewhere."""
    mesh = xd.init_device_mesh("xla", (2,))
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    with pytest.raises(ValueError, match=r"0.weight, 0.bias have no shape .* call the module once"):
        xd.distribute_module(model, mesh)
    x = torch.randn(2, 3)
    expected = model(x)
    xd.distribute_module(model, mesh)
    ours = model(xd.distribute_tensor(x, mesh, [xd.Shard(0)]))
    torch.testing.assert_close(ours.full_tensor().cpu(), expected)
