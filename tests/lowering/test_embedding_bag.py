"""`embedding_bag` and its gradients on xla tensors against CPU torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import xla_dtensor as xd

INDICES = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9, 2, 2])
OFFSETS = torch.tensor([0, 4, 4, 9])  # the second bag is empty
# The last offset says where the last bag ends. Only the number of indices is allowed: with less,
# CPU torch's gradient reads a row past the end of its buffer.
WITH_LAST_OFFSET = torch.tensor([0, 4, 4, 10])


def _run(device: str, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weight = torch.randn(10, 3).to(device).requires_grad_()
    leaves = [weight]
    if options.pop("weighted", False):
        leaves.append(torch.rand(10).to(device).requires_grad_())
        options["per_sample_weights"] = leaves[1]
    offsets = WITH_LAST_OFFSET if options.get("include_last_offset") else OFFSETS
    out = F.embedding_bag(INDICES.to(device), weight, offsets.to(device), **options)
    grads = torch.autograd.grad(out, leaves, torch.arange(out.numel()).to(out).view(out.shape))
    return [t.detach().cpu() for t in (out, *grads)]


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "mean"},
        {"mode": "max"},
        {"mode": "sum", "weighted": True},
        {"mode": "sum", "weighted": True, "padding_idx": 2},
        {"mode": "mean", "padding_idx": 2},
        {"mode": "max", "padding_idx": -8},
        {"mode": "sum", "include_last_offset": True},
    ],
    ids=str,
)
def test_result_and_gradients(options: dict[str, Any]) -> None:
    for actual, expected in zip(_run("xla", **options), _run("cpu", **options), strict=True):
        torch.testing.assert_close(actual, expected)


def test_gradients_scaled_by_frequency() -> None:
    # CPU torch counts the wrong rows here (embedding_bag alone), so: a bag per index.
    def grad(function: Any, device: str, *rest: torch.Tensor) -> torch.Tensor:
        weight = torch.ones(10, 3).to(device).requires_grad_()
        out = function(INDICES.to(device), weight, *rest, scale_grad_by_freq=True)
        return torch.autograd.grad(out.sum(), weight)[0].cpu()

    bags = grad(F.embedding_bag, "xla", torch.arange(len(INDICES)).to("xla"))
    single = grad(F.embedding, "cpu")
    torch.testing.assert_close(bags, single)


def test_sparse_gradients_raise() -> None:
    with pytest.raises(xd.UnsupportedOpError, match="sparse"):
        _run("xla", mode="sum", sparse=True)


def test_weights_of_a_mean_raise() -> None:
    weight, ones = torch.randn(10, 3), torch.ones(10)
    with pytest.raises(NotImplementedError, match="per_sample_weights"):
        F.embedding_bag(
            INDICES.to("xla"),
            weight.to("xla"),
            OFFSETS.to("xla"),
            mode="mean",
            per_sample_weights=ones.to("xla"),
        )
