"""`grid_sampler` and its gradients against CPU torch."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.lowering.harness import check_call

aten = torch.ops.aten
ALL = list(itertools.product((0, 1), (0, 1, 2), (True, False)))


def _grid(*shape: int) -> torch.Tensor:
    # Outside of the image too.
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3)) * 3 - 1.5


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("mode", "padding", "align"), [*ALL, *((2, p, a) for _, p, a in ALL[:6])])
def test_2d(mode: int, padding: int, align: bool) -> None:
    image, grid = torch.randn(2, 3, 5, 7), _grid(2, 4, 6, 2)
    options = (mode, padding, align)
    assert not check_call(aten.grid_sampler_2d.default, image, grid, *options).mismatches
    grad = torch.randn(2, 3, 4, 6)
    backward = aten.grid_sampler_2d_backward.default
    assert not check_call(backward, grad, image, grid, *options, [True, True]).mismatches


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("mode", "padding", "align"), ALL)
def test_3d(mode: int, padding: int, align: bool) -> None:
    image, grid = torch.randn(2, 3, 4, 5, 3), _grid(2, 3, 2, 4, 3)
    options = (mode, padding, align)
    assert not check_call(aten.grid_sampler_3d.default, image, grid, *options).mismatches
    grad = torch.randn(2, 3, 3, 2, 4)
    backward = aten.grid_sampler_3d_backward.default
    assert not check_call(backward, grad, image, grid, *options, [True, True]).mismatches


def test_a_nan_coordinate_and_no_samples() -> None:
    grid = _grid(1, 2, 2, 2)
    grid[0, 0, 0, 0] = torch.nan
    image = torch.randn(1, 2, 3, 3)
    # Where a NaN is read with zeros around the image is undefined in torch.
    assert not check_call(aten.grid_sampler_2d.default, image, grid, 0, 1, True).mismatches
    empty = torch.zeros(1, 0, 2, 2)
    assert not check_call(aten.grid_sampler_2d.default, image, empty, 0, 0, True).mismatches
