"""Attention that a model computes by itself moves what the operation does, in whatever words."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.planning.collectives import collective_traffic

HEADS, DIM = 8, 128


def operation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    return (weights @ v).transpose(1, 2)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def by_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, length, heads, dim = q.shape
    q, k, v = (x.transpose(1, 2).reshape(batch * heads, length, dim) for x in (q, k, v))
    weights = torch.baddbmm(torch.zeros(1, 1, 1, device=q.device), q, k.mT, alpha=dim**-0.5)
    made = torch.bmm(weights.softmax(-1), v)
    return made.view(batch, heads, length, dim).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.inputs = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x).unflatten(-1, (HEADS, -1)) for layer in self.inputs)
        made: Tensor = self.out(self.attend(*parts).flatten(-2))
        return x + made


def losses(attend: Callable[..., Tensor], mesh: str | None) -> tuple[list[float], int]:
    """Of a few steps, and the bytes that one moves: batch over the first mesh dim, heads over the
    last."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(attend), Attention(attend))
    x = torch.randn(8, 32, DIM)
    if mesh is not None:
        devices = make_mesh(mesh)
        others = [xd.Replicate()] * (devices.ndim - 1)
        for name, p in list(model.named_parameters()):
            owner, _, own = name.rpartition(".")
            cut = 1 if "out" in name else 0
            where = xd.Replicate() if name.endswith("out.bias") else xd.Shard(cut)
            laid_out = xd.distribute_tensor(p.data, devices, [*others, where])
            model.get_submodule(owner).register_parameter(own, nn.Parameter(laid_out))
        x = xd.distribute_tensor(x, devices, [xd.Shard(0), *others[1:], xd.Replicate()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step if mesh is None else xd.compile(step)
    found = [run(x).item() for _ in range(3)]
    if mesh is None:
        return found, 0
    return found, collective_traffic(run.compiled_programs()[-1].as_text()).total_bytes


operation_losses = functools.cache(functools.partial(losses, operation))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mesh", ["2x4", "2x2x2"])
@pytest.mark.parametrize("attend", [by_matmul, by_einsum, by_bmm], ids=lambda f: f.__name__)
def test_moves_what_the_operation_moves(attend: Callable[..., Tensor], mesh: str) -> None:
    expected, _ = losses(attend, None)
    _, wanted = operation_losses(mesh)
    found, moved = losses(attend, mesh)
    assert found == pytest.approx(expected, rel=1e-4)
    assert moved <= 1.01 * wanted
