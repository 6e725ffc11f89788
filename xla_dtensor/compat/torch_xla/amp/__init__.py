"""Mixed precision: ``torch.autocast``, which knows the device, and torch's ``GradScaler``."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import GradScaler as _GradScaler

__all__ = ["GradScaler", "autocast"]


def autocast(
    device: Any = None,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
    cache_enabled: bool | None = None,
) -> torch.autocast:
    """``torch.autocast("xla")``; by default in bfloat16, as torch_xla's."""
    return torch.autocast("xla", dtype or torch.bfloat16, enabled, cache_enabled)


class GradScaler(_GradScaler):
    """``torch.amp.GradScaler`` of the xla device."""

    def __init__(self, *args: Any, use_zero_grad: bool = False, **kwargs: Any) -> None:
        super().__init__("xla", *args, **kwargs)
