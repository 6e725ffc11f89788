"""Views of parameters around writes under `no_grad`: torch makes the history of such a view anew,
or, if it was made under `no_grad`, doesn't say any more whether it has one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import xla_dtensor as xd


def made_before_no_grad(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    view = p.view(16)
    with torch.no_grad():
        p[0] = 1
        return view[2:6] * 2


def made_under_no_grad(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        view = p.view(16)
        p.mul_(0.5)
        return view * 2


def written_through_it(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        view = p.view(16)
        view[4:8] = 3
    return (p * p).sum() + view.detach().sum()


def a_row_of_it(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    view = p.view(16)
    with torch.no_grad():
        p.mul_(0.5)
        row = view[3:9]
    return (view * 3)[3:9] + row.clone()


def captured(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        p[0] = 1
        part = v[2:5] * 2
    return (v * v)[:3] + part


STEPS = [
    made_before_no_grad,
    made_under_no_grad,
    written_through_it,
    a_row_of_it,
    captured,
]


@pytest.mark.parametrize("step", STEPS)
def test_a_parameter_is_written_to(step: Callable[..., torch.Tensor]) -> None:
    own = torch.arange(16.0).view(4, 4).clone().requires_grad_()
    p = own.detach().to("xla").requires_grad_()
    own_view, view = own.view(16), p.view(16)
    compiled = xd.compile(lambda: step(p, view))
    for _ in range(3):
        expected, result = step(own, own_view), compiled()
        torch.testing.assert_close(result.detach().cpu(), expected.detach())
        torch.testing.assert_close(p.detach().cpu(), own.detach())
        assert result.requires_grad == expected.requires_grad
        if expected.requires_grad:
            result.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(p.grad.cpu(), own.grad)
