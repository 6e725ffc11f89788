"""sentence-transformers on "xla", where `device_choice` says so. Checked in 5.6."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.ecosystem.device_choice import device_for
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over


def install() -> None:
    """When its module is imported."""
    on_import("sentence_transformers.util.environment", _hook)


def _hook(module: Any) -> None:
    take_over(module.get_device_name, _name)


def _name(original: Any, args: Any, kwargs: Any) -> str:
    return str(device_for(torch.device(original(*args, **kwargs))))
