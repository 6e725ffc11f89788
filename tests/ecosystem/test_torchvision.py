"""torchvision's C++ operations on xla tensors, against the same on CPU tensors: values, gradients,
layouts, compiled steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
from xla_dtensor import Replicate, Shard
from xla_dtensor.ecosystem.torchvision import nms_static

pytest.importorskip("torchvision", reason="torchvision isn't in this environment")
from torchvision import ops
from torchvision.extension import _has_ops

if not _has_ops():
    pytest.skip("torchvision's operations are built for another torch", allow_module_level=True)

R = Replicate()
Operation = Callable[..., torch.Tensor]

REGIONS: dict[str, Operation] = {
    "align": lambda x, rois: ops.roi_align(x, rois, (3, 2), 0.5, 2),
    "align_3": lambda x, rois: ops.roi_align(x, rois, (3, 2), 0.5, 3, aligned=True),
    "align_all": lambda x, rois: ops.roi_align(x, rois, (3, 2), 0.5, -1),
    "align_all_aligned": lambda x, rois: ops.roi_align(x, rois, (3, 2), 0.5, -1, aligned=True),
    "pool": lambda x, rois: ops.roi_pool(x, rois, (3, 2), 0.5),
    "ps_align": lambda x, rois: ops.ps_roi_align(x, rois, (3, 2), 0.5, 2),
    "ps_align_all": lambda x, rois: ops.ps_roi_align(x, rois, (3, 2), 0.5, -1),
    "ps_pool": lambda x, rois: ops.ps_roi_pool(x, rois, (3, 2), 0.5),
}


def image(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 24, 11, 14, generator=torch.Generator().manual_seed(seed))


def regions(count: int = 16) -> torch.Tensor:
    """Some reach out of the image, one is inside out, one lies nowhere in it."""
    generator = torch.Generator().manual_seed(1)
    which = torch.randint(0, 2, (count, 1), generator=generator)
    corner = torch.rand(count, 2, generator=generator) * 22 - 4
    size = torch.rand(count, 2, generator=generator) * 20
    rois = torch.cat([which, corner, corner + size], 1)
    rois[0, 3:] = rois[0, 1:3] - 1
    rois[1, 1:] += 100
    return rois


def with_gradients(
    operation: Operation, tensors: Sequence[torch.Tensor], wanted: int = 1
) -> list[torch.Tensor]:
    """The result, and the gradients of the first ``wanted`` tensors, of a sum weighted by place."""
    leaves = [t.detach().requires_grad_(i < wanted) for i, t in enumerate(tensors)]
    result = operation(*leaves)
    places = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).reshape(result.shape)
    weights = places.to(result.dtype)
    if isinstance(result, xd.XLAShardedTensor):
        mesh = result.device_mesh
        weights = xd.distribute_tensor(weights, mesh, [R] * mesh.ndim)
    else:
        weights = weights.to(result.device)
    return [result, *torch.autograd.grad((result * weights).sum(), leaves[:wanted])]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().cpu() if isinstance(tensor, xd.XLAShardedTensor) else tensor.cpu()


def close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(
            whole(ours).detach(), theirs.detach(), rtol=1e-5, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize("name", REGIONS)
def test_regions(name: str) -> None:
    operation, tensors = REGIONS[name], [image(), regions()]
    found = with_gradients(operation, [t.to("xla") for t in tensors])
    close(found, with_gradients(operation, tensors))
    assert found[0].device.type == "xla"


@pytest.mark.parametrize("name", ["align_all", "pool", "ps_align", "ps_pool"])
def test_no_regions(name: str) -> None:
    tensors = [image(), regions()[:0]]
    found = with_gradients(REGIONS[name], [t.to("xla") for t in tensors])
    close(found, with_gradients(REGIONS[name], tensors))


@pytest.mark.parametrize("name", ["align_all", "pool", "ps_align_all", "ps_pool"])
def test_regions_that_are_much_larger_than_the_image(name: str) -> None:
    far = regions()
    far[:, 1:3] -= 700
    far[:, 3:] += 900
    tensors = [image(), far]
    found = with_gradients(REGIONS[name], [t.to("xla") for t in tensors])
    close(found, with_gradients(REGIONS[name], tensors))


def test_a_region_without_an_end_ends() -> None:
    rois = torch.tensor([[0, 0, 0, 1e30, 1e30], [0, 0, 0, float("inf"), 4], [0, 0, 0, 6, 4.0]])
    found = ops.roi_align(image().to("xla"), rois.to("xla"), (3, 2))
    torch.testing.assert_close(found[2].cpu(), ops.roi_align(image(), rois[2:], (3, 2))[0])


@pytest.mark.parametrize("bins", [3, 5, 6, 7])
def test_a_bin_of_whole_pixels_is_read_at_as_many_places(bins: int) -> None:
    """By a product with 1/7 it would be a bit longer, and read at one more."""
    x = torch.randn(1, 2, 80, 80)
    ends = [[0.0, 0.0, 0.0, bins * i, bins * j] for i in range(1, 12) for j in (1, 4, 7)]
    tensors = [x, torch.tensor(ends)]
    for operation in (ops.roi_align, ops.roi_pool):
        call = lambda *given, operation=operation: operation(*given, (bins, bins))
        close(with_gradients(call, [t.to("xla") for t in tensors]), with_gradients(call, tensors))


def test_double_precision() -> None:
    tensors = [image().double(), regions().double()]
    for name in ("align_all", "pool"):
        found = with_gradients(REGIONS[name], [t.to("xla") for t in tensors])
        for ours, theirs in zip(found, with_gradients(REGIONS[name], tensors), strict=True):
            torch.testing.assert_close(ours.cpu().detach(), theirs.detach(), rtol=1e-12, atol=1e-12)


LAYOUTS: dict[str, tuple[list[Any], list[Any]]] = {
    "whole": ([R, R], [R, R]),
    "regions": ([R, R], [Shard(0), Shard(0)]),
    "both": ([R, Shard(1)], [Shard(0), R]),
    "images": ([Shard(0), R], [R, Shard(0)]),
    "channels": ([Shard(1), Shard(1)], [R, R]),
    "rows": ([Shard(2), R], [R, Shard(1)]),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("count", [16, 13])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["align", "align_all", "pool", "ps_align", "ps_pool"])
def test_regions_on_a_mesh(
    mesh_2x4: DeviceMesh, name: str, is_compiled: bool, layout: str, count: int
) -> None:
    tensors = [image(), regions(count)]
    expected = with_gradients(REGIONS[name], tensors)
    step: Any = lambda *given: with_gradients(REGIONS[name], given)
    if is_compiled:
        step = xd.compile(step)
    placed = [
        xd.distribute_tensor(t, mesh_2x4, p) for t, p in zip(tensors, LAYOUTS[layout], strict=True)
    ]
    for _ in range(2):
        close(step(*placed), expected)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", ["whole", "both"])
@pytest.mark.parametrize("name", ["align_all", "pool", "ps_pool"])
def test_no_regions_on_a_mesh(
    mesh_2x4: DeviceMesh, name: str, layout: str, is_compiled: bool
) -> None:
    tensors = [image(), regions()[:0]]
    step: Any = lambda *given: with_gradients(REGIONS[name], given)
    if is_compiled:
        step = xd.compile(step)
    pairs = zip(tensors, LAYOUTS[layout], strict=True)
    found = step(*[xd.distribute_tensor(t, mesh_2x4, p) for t, p in pairs])
    close(found, with_gradients(REGIONS[name], tensors))


def test_where_regions_lie(mesh_2x4: DeviceMesh) -> None:
    """Regions and channels stay sharded, and no value moves."""
    x = xd.distribute_tensor(image(), mesh_2x4, [R, Shard(1)])
    rois = xd.distribute_tensor(regions(), mesh_2x4, [Shard(0), R])
    assert ops.roi_align(x, rois, 3).placements == (Shard(0), Shard(1))
    assert ops.roi_pool(x, rois, 3).placements == (Shard(0), Shard(1))
    whole_x = xd.distribute_tensor(image(), mesh_2x4, [R, R])
    assert ops.ps_roi_align(whole_x, rois, (3, 2)).placements == (Shard(0), R)


def test_regions_per_device(mesh_2x4: DeviceMesh) -> None:
    """Each device has an image and regions of its own."""
    images, rois = [image(i) for i in range(8)], [regions() + i for i in range(8)]
    for each in rois:
        each[:, 0] %= 2
    x = xd.from_device_values(images, mesh_2x4)
    y = ops.roi_align(x, xd.from_device_values(rois, mesh_2x4), (3, 2), 0.5)
    for i, found in enumerate(y.local_values()):
        expected = ops.roi_align(images[i], rois[i], (3, 2), 0.5)
        torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-5, atol=1e-5)


# --- deform_conv2d -------------------------------------------------------------------------------


def deformable(groups: int, offset_groups: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    return [
        draw(4, 6, 9, 8),
        draw(4, 2 * offset_groups * 6, 4, 11) * 2,
        draw(12, 6 // groups, 3, 2),
        draw(12),
        draw(4, offset_groups * 6, 4, 11).sigmoid(),
    ]


def deform(
    x: torch.Tensor, offset: torch.Tensor, weight: torch.Tensor, bias: Any = None, mask: Any = None
) -> torch.Tensor:
    return ops.deform_conv2d(x, offset, weight, bias, (2, 1), (1, 2), (2, 1), mask)


@pytest.mark.parametrize(("groups", "offset_groups"), [(1, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("count", [3, 4, 5], ids=["plain", "bias", "mask"])
def test_deform_conv(groups: int, offset_groups: int, count: int) -> None:
    tensors = deformable(groups, offset_groups)[:count]
    found = with_gradients(deform, [t.to("xla") for t in tensors], count)
    close(found, with_gradients(deform, tensors, count))


def test_offsets_of_whole_pixels_and_at_the_edge() -> None:
    tensors = deformable(1, 1)
    tensors[1] = tensors[1].round()
    found = with_gradients(deform, [t.to("xla") for t in tensors], 5)
    close(found, with_gradients(deform, tensors, 5))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    "placements",
    [
        [[Shard(0), R], [Shard(0), R], [R, Shard(0)], [R, Shard(0)], [Shard(0), R]],
        [[Shard(1), R], [R, R], [R, Shard(1)], [R, R], [R, Shard(2)]],
    ],
    ids=["fits", "moves"],
)
def test_deform_conv_on_a_mesh(
    mesh_2x4: DeviceMesh, placements: list[list[Any]], groups: int, is_compiled: bool
) -> None:
    tensors = deformable(groups, 1)
    step: Any = lambda *given: with_gradients(deform, given, 5)
    if is_compiled:
        step = xd.compile(step)
    pairs = zip(tensors, placements, strict=True)
    found = step(*[xd.distribute_tensor(t, mesh_2x4, p) for t, p in pairs])
    close(found, with_gradients(deform, tensors, 5))
    if groups == 1 and placements[0][0] == Shard(0):
        assert found[0].placements == (Shard(0), Shard(1))


# --- nms -----------------------------------------------------------------------------------------


def boxes(count: int = 120, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With scores, some of which are equal, and categories."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * 50
    size = torch.rand(count, 2, generator=generator) * 30
    scores = torch.rand(count, generator=generator)
    scores[:20] = 0.5
    categories = torch.randint(0, 3, (count,), generator=generator)
    return torch.cat([corner, corner + size], 1), scores, categories


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9])
def test_nms(threshold: float) -> None:
    found, scores, categories = boxes()
    ours = [t.to("xla") for t in (found, scores, categories)]
    kept = ops.nms(ours[0], ours[1], threshold)
    assert kept.device.type == "xla"
    assert kept.cpu().equal(ops.nms(found, scores, threshold))
    assert (
        ops.batched_nms(*ours, threshold)
        .cpu()
        .equal(ops.batched_nms(found, scores, categories, threshold))
    )
    assert ops.nms(ours[0][:0], ours[1][:0], threshold).shape == (0,)


def test_nms_on_a_mesh(mesh_2x4: DeviceMesh) -> None:
    found, scores, _ = boxes()
    ours = [xd.distribute_tensor(t, mesh_2x4, [Shard(0), R]) for t in (found, scores)]
    assert ops.nms(*ours, 0.3).full_tensor().cpu().equal(ops.nms(found, scores, 0.3))
    kept = nms_static(*ours, 0.3, size=10)
    assert kept.placements == (R, R)
    assert kept.full_tensor().cpu().equal(ops.nms(found, scores, 0.3)[:10])


def test_nms_in_a_compiled_step_names_the_way_out() -> None:
    @xd.compile
    def step(found: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return ops.nms(found, scores, 0.3)

    found, scores, _ = boxes()
    with pytest.raises(xd.DataDependentError, match=r"nms_static\(.*size=n\)"):
        step(found.to("xla"), scores.to("xla"))


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("size", [0, 5, 150])
def test_static_nms(threshold: float, size: int) -> None:
    """In a step, and outside; what is kept is torchvision's, and then comes what fills."""

    @xd.compile
    def step(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found, scores, categories = given
        return (
            nms_static(found, scores, threshold, size=size),
            nms_static(found, scores, threshold, size=size, idxs=categories, fill_value=-7),
        )

    for seed in (3, 4):
        found, scores, categories = boxes(seed=seed)
        scores += torch.arange(len(scores)) * 1e-4  # the order of equal ones isn't promised
        kept = ops.nms(found, scores, threshold)
        by_category = ops.boxes._batched_nms_vanilla(found, scores, categories, threshold)
        given = [t.to("xla") for t in (found, scores, categories)]
        for results in (step(*given), step.__wrapped__(*given)):
            for expected, fill, result in zip((kept, by_category), (-1, -7), results, strict=True):
                padded = torch.full((size,), fill)
                padded[: len(expected)] = expected[:size]
                assert result.cpu().equal(padded)


def test_static_nms_of_cpu_tensors() -> None:
    found, scores, categories = boxes()
    for idxs in (None, categories):
        ours = None if idxs is None else idxs.to("xla")
        expected = nms_static(found, scores, 0.3, size=90, idxs=idxs)
        result = nms_static(found.to("xla"), scores.to("xla"), 0.3, size=90, idxs=ours)
        assert result.cpu().equal(expected)
    assert nms_static(found, scores, 0.3, size=90)[:20].equal(ops.nms(found, scores, 0.3)[:20])


def test_an_overlap_is_compared_in_double_precision() -> None:
    """0.7 and 0.1 as float32 lie on different sides of the numbers, as overlaps of boxes may."""
    found = torch.tensor([[0.0, 0, 10, 1], [0, 0, 7, 1], [20, 0, 30, 1], [20, 0, 21, 1]])
    scores = torch.tensor([0.9, 0.8, 0.7, 0.6])
    for threshold in (0.7, 0.1, float(torch.tensor(0.1)), float(torch.tensor(0.7))):
        kept = nms_static(found.to("xla"), scores.to("xla"), threshold, size=4).cpu()
        assert kept[kept >= 0].equal(ops.nms(found, scores, threshold)), threshold


def test_static_nms_refuses_what_does_not_fit() -> None:
    found, scores, categories = (t.to("xla") for t in boxes())
    with pytest.raises(RuntimeError, match=r"scores should be \[120\]"):
        nms_static(found, scores[1:], 0.5, size=3)
    with pytest.raises(RuntimeError, match=r"boxes should be \[N, 4\]"):
        nms_static(found[:, :3], scores, 0.5, size=3)
    with pytest.raises(RuntimeError, match="size should be 0 or more"):
        nms_static(found, scores, 0.5, size=-1, idxs=categories)


# --- autocast, imports, models -------------------------------------------------------------------


def test_autocast() -> None:
    """In float32, with the result in the image's precision, as torchvision has it for CUDA."""
    x, rois = image().bfloat16(), regions()
    expected = ops.roi_align(x.float(), rois, (3, 2)).bfloat16()
    tensors = deformable(1, 1)
    found, scores, _ = boxes()
    with torch.autocast("xla"):
        y = ops.roi_align(x.to("xla"), rois.to("xla"), (3, 2))
        kept = ops.nms(found.to("xla"), scores.to("xla").bfloat16(), 0.5)
        z = deform(*(t.to("xla").bfloat16() for t in tensors))
    assert y.dtype == z.dtype == torch.bfloat16
    torch.testing.assert_close(y.cpu(), expected)
    assert kept.cpu().equal(ops.nms(found, scores.bfloat16().float(), 0.5))
    torch.testing.assert_close(
        z.cpu().float(), deform(*(t.bfloat16().float() for t in tensors)), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("order", ["torchvision, xla_dtensor", "xla_dtensor, torchvision"])
def test_order_of_imports(order: str) -> None:
    """Importing both loads no JAX; the first tensor finds the lowerings."""
    code = (
        f"import sys, torch, {order}\n"
        "assert 'jax' not in sys.modules\n"
        "x, rois = torch.ones(1, 1, 4, 4).to('xla'), torch.tensor([[0, 0, 0, 4., 4.]]).to('xla')\n"
        "print(torchvision.ops.roi_align(x, rois, 2).sum().item())\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.stdout.strip() == "4.0", out.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fasterrcnn_mobilenet_v3_large_320_fpn", "fcos_resnet50_fpn"])
def test_detection_model(name: str) -> None:
    """Losses, gradients and inference. In double precision: untrained models have many boxes of
    nearly the same score, and which of them are kept hangs on the last bits. All anchors are taken,
    so that it doesn't matter which are drawn."""
    import copy

    from torchvision.models import detection

    torch.manual_seed(0)
    sizes = {"min_size": 96, "max_size": 128}
    model = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=3, **sizes)
    model.double()
    for part in ("rpn", "roi_heads"):
        if hasattr(model, part):
            getattr(model, part).fg_bg_sampler.batch_size_per_image = 100_000
    pictures = [torch.rand(3, 96, 128).double(), torch.rand(3, 80, 100).double()]
    targets = [
        {
            "boxes": torch.tensor([[10.0, 10, 50, 60], [60, 20, 110, 80]]).double(),
            "labels": torch.tensor([1, 2]),
        },
        {"boxes": torch.tensor([[5.0, 5, 70, 70]]).double(), "labels": torch.tensor([1])},
    ]

    def run(model: Any, device: str) -> tuple[Any, ...]:
        ours = [x.to(device) for x in pictures]
        losses = model.train()(ours, [{k: v.to(device) for k, v in t.items()} for t in targets])
        sum(losses.values()).backward()
        gradients = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            found = model.eval()(ours)
        return {k: v.detach().cpu() for k, v in losses.items()}, gradients, found

    expected, ours = run(copy.deepcopy(model), "cpu"), run(copy.deepcopy(model).to("xla"), "xla")
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-7, atol=1e-7)
    for result, theirs in zip(ours[2], expected[2], strict=True):
        # Boxes of exactly equal scores may change places.
        for key in ("scores", "labels"):
            torch.testing.assert_close(result[key].cpu(), theirs[key], rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(
            result["boxes"].cpu().sort(0)[0], theirs["boxes"].sort(0)[0], rtol=1e-7, atol=1e-7
        )
