"""The margin losses' gradients against CPU torch, ties and repeated labels included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import xla_dtensor  # noqa: F401  (the "xla" device)


def _compare(function: object, x: torch.Tensor, *rest: torch.Tensor) -> None:
    results = []
    for device in ("cpu", "xla"):
        leaf = x.to(device).requires_grad_()
        loss = function(leaf, *(t.to(device) for t in rest))  # type: ignore[operator]
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        results.append((loss.detach().cpu(), grad.cpu()))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("p", [1, 2])
def test_multi_margin(reduction: str, p: int) -> None:
    x, target = torch.randn(4, 5), torch.tensor([0, 4, 2, 2])
    x[1, 3] = x[1, 4] - 1  # exactly at the margin: no gradient
    weight = torch.rand(5)
    loss = lambda x, t, w: F.multi_margin_loss(x, t, p=p, weight=w, reduction=reduction)
    _compare(loss, x, target, weight)
    _compare(lambda x, t: F.multi_margin_loss(x, t, p=p, reduction=reduction), x[0], target[0])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_multilabel_margin(reduction: str) -> None:
    x = torch.randn(3, 4)
    x[0, 1] = x[0, 0] - 1
    target = torch.tensor([[0, 2, -1, 1], [3, 3, -1, 0], [-1, 0, 1, 2]])
    loss = lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction)
    _compare(loss, x, target)
    _compare(loss, x[1], target[1])
