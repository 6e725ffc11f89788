"""torchvision's C++ operations on xla tensors, and one of our own: `nms_static`.

torchvision has kernels for the CPU and CUDA alone. Here are lowerings and layout rules of the same
overloads (`region_operations`, `deform_conv`), so that ``torchvision.ops`` and the detection models
that are built on it run as they are, with torchvision's own autograd functions. Which boxes `nms`
keeps is read on the host (`suppression`), as `torch.nonzero` is: their number depends on values.
Checked with 0.26 and 0.28.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from xla_dtensor.integration.patching.on_import import on_import

_NAME = "xla_dtensor.ecosystem.torchvision"


def install() -> None:
    """When torchvision is imported: operations; the lowerings, which load JAX, with the first xla
    tensor."""
    on_import("torchvision.extension", _hook)


def _hook(extension: Any) -> None:
    if not extension._has_ops():
        return  # a build for another torch: torchvision says so itself where they are called
    importlib.import_module(f"{_NAME}.definitions").define()
    on_import("xla_dtensor.movement.backend", _register)


def _register(_: Any) -> None:
    for name in ("region_operations", "deform_conv", "suppression"):
        importlib.import_module(f"{_NAME}.{name}")


def nms_static(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    iou_threshold: float,
    *,
    size: int,
    idxs: torch.Tensor | None = None,
    fill_value: int = -1,
) -> torch.Tensor:
    """`torchvision.ops.nms` with a result of fixed length, for compiled steps: what
    `torch.nonzero_static` is to `torch.nonzero`. On CPU tensors, too.

    Args:
        boxes: ``[N, 4]``, as ``(x1, y1, x2, y2)``.
        scores: ``[N]``, of the same dtype.
        iou_threshold: boxes that overlap one of a higher score by more are left out.
        size: how many indices are returned: of those that are kept the first, by score.
        idxs: ``[N]``, the category of each box: only boxes of one category exclude each other, as
            in `torchvision.ops.batched_nms`.
        fill_value: stands where fewer than ``size`` boxes are kept.

    Returns:
        ``[size]``, int64: indices into ``boxes``, by decreasing score.

    Raises:
        RuntimeError: shapes or dtypes aren't those, or ``size`` is negative.
        ImportError: torchvision isn't there, or has no operations.

    Example::

        from xla_dtensor.ecosystem.torchvision import nms_static

        keep = nms_static(boxes, scores, 0.5, size=100)
        found = keep >= 0
        best = torch.where(found[:, None], boxes[keep.clamp(min=0)], 0)
    """
    from torchvision.extension import _has_ops

    if not _has_ops():
        raise ImportError("nms_static: torchvision's operations can't be loaded (another torch?)")
    return torch.ops.xla_dtensor.nms_static(
        boxes, scores, idxs, iou_threshold, size=size, fill_value=fill_value
    )
