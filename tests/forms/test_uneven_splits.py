"""Views that take apart a dim in uneven shards (`base/xla_faults.py`, UNEVEN_SPLITS)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.execution import lazy


@pytest.mark.parametrize("way", ["lazy", "strict", "compiled"])
def test_a_gradient_goes_back_into_other_shards(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Seed 14030 of the fuzzer: joined into one program it ended the process.
    monkeypatch.setattr(lazy, "OFTEN", 0)
    monkeypatch.setattr(xd.config, "eager", "strict" if way == "strict" else "lazy")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1, 6, generator=generator, requires_grad=True)
    keys = torch.randn(9, 1, 1, 2, generator=generator)

    def loss(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        query = x.reshape([9, 1, 1, 2])
        weight = F.scaled_dot_product_attention(query, keys, keys) + query
        weight.square().sum().backward()
        return weight.detach().sum()

    mesh = make_mesh("2x2x2")
    placed = distribute_tensor(x.detach(), mesh, [Shard(0), Partial(), Shard(0)]).requires_grad_()
    on_devices = distribute_tensor(keys, mesh, [Replicate()] * 3)
    step = xd.compile(loss) if way == "compiled" else loss
    got, wanted = step(placed, on_devices), loss(x, keys)
    torch.testing.assert_close(got.cpu(), wanted)
    torch.testing.assert_close(placed.grad.full_tensor().cpu(), x.grad)


@pytest.mark.parametrize("way", ["lazy", "strict", "compiled"])
def test_a_write_through_a_view_into_other_shards(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seed 4717: what is written lies as XLA likes, four elements over eight devices.
    monkeypatch.setattr(lazy, "OFTEN", 0)
    monkeypatch.setattr(xd.config, "eager", "strict" if way == "strict" else "lazy")
    x = torch.tensor([[0.5, -1.5], [2.0, 0.25]], requires_grad=True)
    added = torch.tensor([1.5, 1.0, -1.75, -0.5]).reshape(1, 1, 4, 1)

    def loss(x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        whole = x.redistribute(placements=[Replicate()]) if isinstance(x, DTensor) else x
        copy = whole.clone()
        copy.reshape([1, 1, 4, 1]).add_(added)
        copy.sin().sum().backward()
        return copy.detach().sum()

    mesh = make_mesh("8")
    placed = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
    step = xd.compile(loss) if way == "compiled" else loss
    got = step(placed, distribute_tensor(added, mesh, [Shard(2)]))
    torch.testing.assert_close(got.cpu(), loss(x, added))
    torch.testing.assert_close(placed.grad.full_tensor().cpu(), x.grad)
