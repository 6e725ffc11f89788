"""`shard_by_size`: which dims are cut, and CPU torch's gradients whatever is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

R, S = Replicate(), Shard


@pytest.mark.parametrize(
    ("shape", "mesh", "wanted"),
    [
        ((64, 16), (4, 2), [S(0), S(1)]),
        ((16, 64), (2, 4), [S(0), S(1)]),
        ((64, 7), (2, 4), [S(0), S(0)]),
        ((6, 50), (2, 4), [S(1), R]),  # nothing divides by 4
        ((33, 35), (2, 4), [R, R]),
        ((1024,), (2, 4), [S(0), S(0)]),
        ((4, 5), (2, 4), [R, R]),  # small
    ],
)
def test_what_is_cut(shape: tuple[int, ...], mesh: tuple[int, ...], wanted: list[object]) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(shape))
    value = module.weight.detach().clone()
    on = xd.init_device_mesh("xla", mesh)
    xd.parallel.shard_by_size(module, on, least=64)
    assert list(module.weight.placements) == wanted
    assert torch.equal(module.weight.detach().full_tensor().cpu(), value)


def test_a_model_with_shared_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
            self.out.weight = self.embed.weight
            self.scale = nn.Parameter(torch.ones(16), requires_grad=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(tokens) * self.scale)

    expected = Tied()
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    model = xd.parallel.shard_by_size(copy.deepcopy(expected), mesh, least=256)
    assert model.out.weight is model.embed.weight and not model.scale.requires_grad
    tokens = torch.randint(32, (4, 6))
    for run, given in (
        (expected, tokens),
        (model, distribute_tensor(tokens, mesh, [S(0), R])),
    ):
        run(given).square().mean().backward()
    found = model.embed.weight.grad
    assert found is not None
    torch.testing.assert_close(found.full_tensor().cpu(), expected.embed.weight.grad)
    with pytest.raises(xd.MeshError, match="no xla mesh"):
        xd.parallel.shard_by_size(Tied(), None)  # type: ignore[arg-type]
