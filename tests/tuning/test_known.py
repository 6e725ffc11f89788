"""Answers that are known: which parallelism `xd.tune` finds, by its estimates alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xla_dtensor as xd
from tests.planning.tpus import needs_libtpu
from tests.tuning.programs import batch, build, training
from xla_dtensor.tuning import Configuration


class Attention(nn.Module):
    """A layer of a language model, of few heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in self.qkv)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))


class Experts(nn.Module):
    """Each token by the one expert that a router says."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up_EDF = nn.Parameter(torch.randn(experts, width, 4 * width) / width)
        self.down_EFD = nn.Parameter(torch.randn(experts, 4 * width, width) / width)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        experts, capacity = len(self.up_EDF), 2 * x_BSD.shape[1] // len(self.up_EDF)
        gate_BSE = self.router(x_BSD).softmax(-1)
        chosen_BSE = F.one_hot(gate_BSE.argmax(-1), experts)
        place_BSE = (chosen_BSE.cumsum(1) - 1) * chosen_BSE
        kept_BSE = (chosen_BSE * (place_BSE < capacity)).to(x_BSD.dtype)
        slot_BSC = F.one_hot(place_BSE.sum(-1).clamp(max=capacity - 1), capacity).to(x_BSD.dtype)
        sent_BSEC = torch.einsum("bse,bsc->bsec", kept_BSE, slot_BSC)
        taken_EBCD = torch.einsum("bsec,bsd->ebcd", sent_BSEC, x_BSD)
        hidden_EBCF = torch.relu(torch.einsum("ebcd,edf->ebcf", taken_EBCD, self.up_EDF))
        given_EBCD = torch.einsum("ebcf,efd->ebcd", hidden_EBCF, self.down_EFD)
        back_BSEC = sent_BSEC * (gate_BSE * kept_BSE)[..., None]
        return x_BSD + torch.einsum("bsec,ebcd->bsd", back_BSEC, given_EBCD)


def estimated(make: Any, data: tuple[torch.Tensor, ...], **given: Any) -> Configuration:
    found = xd.tune(training(make), data, topology="cpu:8", top=0, **given)
    assert {trial.known_by for trial in found.trials} == {"estimate"}
    return found.best


@pytest.mark.slow
def test_long_sequences_are_cut() -> None:
    """Two sequences for eight devices, with two heads: batch and heads are too few."""

    def make() -> nn.Module:
        return nn.Sequential(*(Attention(64, 2) for _ in range(2)))

    best = estimated(make, (torch.randn(2, 1024, 64),))
    assert best.batch[[*best.mesh].index("cp")] == 1
    assert best.mesh["cp"] > 1


@pytest.mark.slow
def test_experts_are_on_an_axis() -> None:
    """Tokens are less than the experts that they go to."""

    def make() -> nn.Module:
        return nn.Sequential(*(Experts(128, 8) for _ in range(2)))

    best = estimated(make, (torch.randn(8, 64, 128),))
    for name in ("0.up_EDF", "1.up_EDF", "0.down_EFD", "1.down_EFD"):
        assert 0 in best.parameters[name]
    data = (torch.randn(8, 64, 128, generator=torch.Generator().manual_seed(1)),)
    same = training(make, torch.optim.SGD)
    expected, step = same(lambda model: model), xd.compile(same(best.apply))
    for _ in range(2):
        loss = step(*best.place(*data)).full_tensor().cpu()
        torch.testing.assert_close(loss, expected(*data), rtol=1e-4, atol=1e-5)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "is_cut"), [(64, True), (2**16, False)])
def test_the_turn_to_tensor_parallelism_on_a_tpu(rows: int, is_cut: bool) -> None:
    """A step's products are cut along columns where a device has fewer rows than that is worth: by
    the scaling book's formula F / (links of FSDP) against rows on a chip times chips."""
    found = xd.tune(build(512, 2), batch(rows, 512), topology="v5e:2x4", top=0)
    best = found.best
    shared = [i for i, dim in enumerate(best.batch) if dim is None]
    up = best.parameters["layers.0.up.weight"]
    assert any(up[i] == 0 for i in shared) == is_cut
