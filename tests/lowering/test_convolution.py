"""Convolution, pooling and resampling against CPU torch, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.conftest import make_mesh
from tests.lowering.harness import check_call, check_overloads

aten = torch.ops.aten


# spatial, groups, transposed, stride, padding, dilation, output padding
CONVOLUTIONS: list[tuple[Any, ...]] = [
    (1, 1, False, [1], [0], [1], [0]),
    (1, 2, False, [2], [3], [2], [0]),
    (2, 1, False, [1, 2], [1, 0], [2, 1], [0, 0]),
    (2, 4, False, [2], [1], [1], [0]),
    (2, 1, True, [1, 1], [0, 0], [1, 1], [0, 0]),
    (2, 2, True, [2, 3], [1, 2], [1, 2], [1, 2]),
    (3, 2, False, [1, 1, 2], [1, 1, 1], [1, 1, 1], [0, 0, 0]),
    (3, 1, True, [2, 1, 2], [0, 1, 0], [1, 1, 1], [1, 0, 0]),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolution(case: Any) -> None:
    spatial, groups, transposed, stride, padding, dilation, output_padding = case
    torch.manual_seed(0)
    x = torch.randn(2, 4, *(6, 7, 5)[:spatial], dtype=torch.float64)
    weight_channels = (4, 6 // groups) if transposed else (4, 4 // groups)
    weight = torch.randn(*weight_channels, *(3, 2, 3)[:spatial], dtype=torch.float64)
    bias = torch.randn(weight.shape[1] * groups if transposed else 4, dtype=torch.float64)
    options = (stride, padding, dilation, transposed, output_padding, groups)
    for b in (None, bias):
        assert check_call(aten.convolution.default, x, weight, b, *options).mismatches == []
    out = aten.convolution(x, weight, None, *options)
    args = (torch.randn_like(out), x, weight, list(bias.shape), *options, [True, True, True])
    assert check_call(aten.convolution_backward.default, *args).mismatches == []


# image, kernel, stride, padding, dilation, output padding (of a transposed one; else None): with
# kernels of which some positions meet only padding. Of the first two of them XLA ends the process
# if it sees that.
PADDED = [
    ((6, 1), 2, 2, 1, 1, None),
    ((4, 1), 2, 2, 1, 1, (0, 1)),
    ((1, 1), 3, 1, 1, 1, None),
    ((1, 2), 5, 1, 2, 1, None),
    ((2, 1), 3, 2, 4, 2, None),
    ((3, 1), 3, 3, 2, 1, (0, 2)),
    ((1, 1), 2, 1, 2, 3, None),
]


@pytest.mark.parametrize("case", PADDED, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_positions_of_kernels_that_meet_only_padding(case: Any, groups: int) -> None:
    image, kernel, stride, padding, dilation, more = case
    torch.manual_seed(0)
    x = torch.randn(2, 4, *image, dtype=torch.float64)
    weight = torch.randn(4, 4 // groups, kernel, kernel, dtype=torch.float64)
    options = ([stride], [padding], [dilation], more is not None, [*(more or (0, 0))], groups)
    assert check_call(aten.convolution.default, x, weight, None, *options).mismatches == []
    out = aten.convolution(x, weight, None, *options)
    args = (torch.randn_like(out), x, weight, None, *options, [True, True, False])
    assert check_call(aten.convolution_backward.default, *args).mismatches == []


@pytest.mark.one_in(22)
# positions, kernel, stride: of products, but for the last one
@pytest.mark.parametrize("groups", [2, 3, 4])
@pytest.mark.parametrize("per_group", [(1, 1), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(
    ("positions", "kernel", "stride"),
    [
        ((1, 1), (1, 1), 1),
        ((3, 3), (3, 3), 2),
        ((4, 2), (1, 2), 1),
        ((4,), (1,), 2),
        ((4,), (3,), 1),
    ],
    ids=str,
)
def test_groups_in_shards(
    positions: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: int,
    per_group: tuple[int, int],
    groups: int,
) -> None:
    torch.manual_seed(0)
    convolve = getattr(F, f"conv{len(positions)}d")
    ins, outs = per_group
    leaves = [torch.randn(2, groups * ins, *positions), torch.randn(groups * outs, ins, *kernel)]

    def gradients(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        x, weight = x.requires_grad_(), weight.requires_grad_()
        out = convolve(x, weight, groups=groups, stride=stride)
        return [out, *torch.autograd.grad((out * out).sum(), (x, weight))]

    expected = gradients(*(leaf.clone() for leaf in leaves))
    mesh = make_mesh("2x4")
    whole: list[Placement] = [Replicate(), Replicate()]
    for layout in ([Replicate(), Shard(1)], [Shard(1), Replicate()], [Shard(0), Shard(1)]):
        placed = [
            distribute_tensor(v, mesh, p) for v, p in zip(leaves, (layout, whole), strict=True)
        ]
        for wanted, got in zip(expected, gradients(*placed), strict=True):
            torch.testing.assert_close(got.full_tensor().cpu(), wanted, rtol=1e-4, atol=1e-4)


def test_dtypes_and_masks() -> None:
    torch.manual_seed(0)
    options = ([1], [1], [1], False, [0], 1)
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.randn(2, 3, 8, dtype=dtype), torch.randn(4, 3, 3, dtype=dtype)
        assert check_call(aten.convolution.default, x, weight, None, *options).mismatches == []
        grad = torch.randn(2, 4, 8, dtype=dtype)
        args = (grad, x, weight, None, *options, [True, False, False])
        assert check_call(aten.convolution_backward.default, *args).mismatches == []


POOLS: list[tuple[str, tuple[Any, ...]]] = [
    ("max_pool2d_with_indices", ([3], [2], [1])),
    ("max_pool2d_with_indices", ([2, 3],)),
    ("max_pool2d_with_indices", ([3, 2], [2, 2], [1, 1], [2, 1], True)),
    ("max_pool2d_with_indices", ([2, 2], [3, 3], [0, 0], [1, 1], True)),
    ("max_pool3d_with_indices", ([2], [2], [1], [1], True)),
    ("avg_pool2d", ([3], [2], [1])),
    ("avg_pool2d", ([3, 2], [2, 2], [1, 1], True, False)),
    ("avg_pool2d", ([2, 2], [3, 3], [0, 0], True)),
    ("avg_pool2d", ([2, 2], [], [0, 0], False, True, 3)),
    ("avg_pool3d", ([2], [2], [1], True, True)),
    ("_adaptive_avg_pool2d", ([3, 2],)),
    ("_adaptive_avg_pool2d", ([1, 1],)),
    ("_adaptive_avg_pool3d", ([2, 3, 7],)),
    ("adaptive_max_pool2d", ([3, 4],)),
    ("adaptive_max_pool3d", ([2, 3, 7],)),
]


@pytest.mark.parametrize(("name", "args"), POOLS)
def test_pool(name: str, args: Any) -> None:
    op = getattr(aten, name).default
    shape = (2, 3, 6, 7, 8) if "3d" in name else (2, 3, 7, 8)
    torch.manual_seed(0)
    for x in (torch.randn(shape), torch.randint(3, shape).float(), torch.randn(shape[1:])):
        assert check_call(op, x, *args).mismatches == []


def test_max_pool_of_nan_and_minus_infinity() -> None:
    x = torch.full((1, 1, 4, 4), -torch.inf)
    x[0, 0, 0, 1], x[0, 0, 1, 0] = torch.nan, torch.nan
    for args in (([2],), ([3], [2], [1])):
        assert check_call(aten.max_pool2d_with_indices.default, x, *args).mismatches == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    [
        "nn.functional.max_pool2d",
        "nn.functional.avg_pool2d",
        "nn.functional.avg_pool3d",
        "nn.functional.adaptive_avg_pool2d",
        "nn.functional.adaptive_max_pool2d",
        "nn.functional.interpolate",
    ],
)
def test_torchs_own_samples_with_backward(name: str) -> None:
    report = check_overloads(name, limit=2, only=lambda overload: "empty" not in overload)
    assert report.mismatches == []


def test_resampling_of_integers() -> None:
    x = torch.randint(256, (1, 2, 5, 6), dtype=torch.uint8)
    assert check_call(aten.upsample_nearest2d.default, x, [10, 9]).mismatches == []
    assert check_call(aten._upsample_nearest_exact2d.default, x, [7, 12]).mismatches == []


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_antialiased(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 9, 8)
    op = getattr(aten, f"_upsample_{name}2d_aa")
    backward = getattr(aten, f"_upsample_{name}2d_aa_backward")
    for size in ([4, 5], [12, 3]):
        assert check_call(op.default, x, size, False).mismatches == []
        grad = torch.randn(1, 2, *size)
        assert check_call(backward.default, grad, size, x.shape, False).mismatches == []


@pytest.mark.parametrize(
    "make,shape",
    [
        (lambda: torch.nn.Conv1d(3, 4, 3), (1, 4, 8)),
        (lambda: torch.nn.Conv2d(3, 4, 3), (1, 5, 8, 8)),
        (lambda: torch.nn.Conv2d(4, 4, 3, groups=2), (1, 5, 8, 8)),
        (lambda: torch.nn.ConvTranspose2d(3, 4, 3), (1, 5, 8, 8)),
        (lambda: torch.nn.Conv2d(3, 4, 3), (5, 8, 8)),
    ],
)
def test_channels_that_do_not_fit(make: Any, shape: tuple[int, ...]) -> None:
    layer, x = make(), torch.randn(shape)
    messages = []
    for device in ("cpu", "xla"):
        with pytest.raises(RuntimeError) as error:
            layer.to(device)(x.to(device))
        messages.append(str(error.value))
    assert messages[0] == messages[1]
