"""torch_xla's names: ``import xla_dtensor.compat.torch_xla as torch_xla``.

Or, with no line of a program changed, ``python -m xla_dtensor.compat.torch_xla program.py``.
``docs/torch_xla.md`` has what is there and what isn't.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.compat.torch_xla import _XLAC, runtime
from xla_dtensor.compat.torch_xla.amp import autocast
from xla_dtensor.compat.torch_xla.core.steps import compile, step, sync
from xla_dtensor.compat.torch_xla.core.xla_model import get_xla_supported_devices
from xla_dtensor.version import VERSION as __version__

__all__ = [
    "_XLAC",
    "__version__",
    "autocast",
    "compile",
    "device",
    "device_count",
    "devices",
    "launch",
    "manual_seed",
    "real_devices",
    "runtime",
    "step",
    "sync",
]


def device(index: int | None = None) -> torch.device:
    """The device that all tensors are on.

    Example::

        import xla_dtensor.compat.torch_xla as torch_xla

        assert torch_xla.device().type == "xla"
    """
    return runtime.xla_device(index)


def devices() -> list[torch.device]:
    """That device alone: what is behind it, `real_devices` says."""
    return [device()]


real_devices = get_xla_supported_devices
device_count = runtime.global_runtime_device_count


def manual_seed(seed: int, device: Any = None) -> torch.Generator:
    """``torch.manual_seed``."""
    return torch.manual_seed(seed)


def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> None:
    """Call ``fn(index, *args)``, with the number of this process, in this process.

    Args:
        fn: the program.
        args: its other arguments.
        start_method, debug_single_process: torch_xla's; no effect.
    """
    fn(runtime.process_index(), *args)
