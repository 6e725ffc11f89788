"""Fractional max pooling against CPU torch, on the same random numbers."""

from __future__ import annotations

import pytest
import torch

from tests.lowering.harness import check_call

aten = torch.ops.aten


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize(("kernel", "out"), [([2, 3], [3, 4]), ([3, 2], [1, 5])])
def test_2d(batch: tuple[int, ...], kernel: list[int], out: list[int]) -> None:
    x, samples = torch.randn(*batch, 3, 9, 10), torch.rand(*(batch or (1,)), 3, 2)
    x[..., 0, 3, 3] = torch.nan
    assert not check_call(aten.fractional_max_pool2d.default, x, kernel, out, samples).mismatches
    values, indices = aten.fractional_max_pool2d(x, kernel, out, samples)
    grad = torch.randn_like(values)
    backward = aten.fractional_max_pool2d_backward.default
    assert not check_call(backward, grad, x, kernel, out, indices).mismatches


def test_3d() -> None:
    x, samples = torch.randn(2, 3, 5, 6, 7), torch.rand(2, 3, 3)
    kernel, out = [2, 3, 2], [3, 2, 4]
    assert not check_call(aten.fractional_max_pool3d.default, x, kernel, out, samples).mismatches
    values, indices = aten.fractional_max_pool3d(x, kernel, out, samples)
    backward = aten.fractional_max_pool3d_backward.default
    grad = torch.randn_like(values)
    assert not check_call(backward, grad, x, kernel, out, indices).mismatches


@pytest.mark.parametrize("spatial", [2, 3])
def test_numbers_of_more_batches_than_there_are(spatial: int) -> None:
    x = torch.randn(4, *(6,) * spatial)
    samples = torch.rand(2, 4, spatial)
    layer = getattr(torch.nn, f"FractionalMaxPool{spatial}d")
    layer = layer(2, output_size=3, _random_samples=samples)
    torch.testing.assert_close(layer.to("xla")(x.to("xla")).cpu(), layer.to("cpu")(x))


@pytest.mark.parametrize("dims", [2, 3])
def test_numbers_of_another_dtype_are_refused(dims: int) -> None:
    """As torch's CPU kernels do (module_db has such samples)."""
    pool = getattr(aten, f"fractional_max_pool{dims}d").default
    x, samples = torch.rand(1, 2, *[5] * dims), torch.rand(1, 2, dims, dtype=torch.float64)
    for device in ("cpu", "xla"):
        with pytest.raises(RuntimeError, match="_random_samples to have the same dtype"):
            pool(x.to(device), [2] * dims, [3] * dims, samples.to(device)).__len__()
