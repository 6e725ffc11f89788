"""Definitions that torch gets when torchvision is imported: `nms_static`, and autocast.

Loads no JAX.
"""

from __future__ import annotations

import torch

from xla_dtensor.base.torch_private import check
from xla_dtensor.integration.operators import autocast

_libraries: list[torch.library.Library] = []


def _check(dets: torch.Tensor, scores: torch.Tensor, idxs: torch.Tensor | None, size: int) -> None:
    check(
        dets.dim() == 2 and dets.size(1) == 4,
        lambda: f"nms_static: boxes should be [N, 4], got {list(dets.shape)}",
    )
    for name, each in (("scores", scores), ("idxs", idxs)):
        check(
            each is None or each.shape == dets.shape[:1],
            lambda name=name: f"nms_static: {name} should be [{dets.size(0)}], as the boxes",
        )
    check(
        dets.dtype == scores.dtype,
        lambda: f"nms_static: boxes are {dets.dtype}, scores {scores.dtype}",
    )
    check(size >= 0, lambda: f"nms_static: size should be 0 or more, got {size}")


def _meta(
    dets: torch.Tensor,
    scores: torch.Tensor,
    idxs: torch.Tensor | None,
    iou_threshold: float,
    *,
    size: int,
    fill_value: int = -1,
) -> torch.Tensor:
    _check(dets, scores, idxs, size)
    return dets.new_empty(size, dtype=torch.int64)


def _on_cpu(
    dets: torch.Tensor,
    scores: torch.Tensor,
    idxs: torch.Tensor | None,
    iou_threshold: float,
    *,
    size: int,
    fill_value: int = -1,
) -> torch.Tensor:
    _check(dets, scores, idxs, size)
    nms = torch.ops.torchvision.nms
    if idxs is None:
        keep = nms(dets, scores, iou_threshold)
    else:  # torchvision moves categories apart where there are few boxes, which rounds them
        is_kept = torch.zeros_like(scores, dtype=torch.bool)
        for category in idxs.unique():
            own = (idxs == category).nonzero()[:, 0]
            is_kept[own[nms(dets[own], scores[own], iou_threshold)]] = True
        order = scores.argsort(descending=True, stable=True)
        keep = order[is_kept[order]]
    result = keep.new_full((size,), fill_value)
    result[: len(keep)] = keep[:size]
    return result


def define() -> None:
    """Once, when torchvision's operations are there."""
    library = torch.library.Library("xla_dtensor", "FRAGMENT")
    library.define(
        "nms_static(Tensor dets, Tensor scores, Tensor? idxs, float iou_threshold, *, SymInt size, "
        "int fill_value=-1) -> Tensor"
    )
    library.impl("nms_static", _meta, "Meta")
    library.impl("nms_static", _on_cpu, "CPU")
    _libraries.append(library)
    autocast.add_library("xla_dtensor", "nms_static")
    regions = "nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"
    autocast.add_library("torchvision", *regions, "deform_conv2d")
