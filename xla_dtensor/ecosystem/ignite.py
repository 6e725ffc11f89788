"""PyTorch-Ignite on "xla", which it takes for torch_xla's: its steps, and the device it finds.

Its `create_supervised_trainer` and `create_supervised_evaluator` know a device of this name as
torch_xla's, and raise where that isn't installed. What they do for other devices is right here.
Checked in 0.5.5.
"""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.ecosystem.device_choice import device_for, refuse_processes
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over


def install() -> None:
    """When its modules are imported."""
    on_import("ignite.engine", _engine)
    on_import("ignite.distributed.comp_models.base", _serial)


def _engine(module: Any) -> None:
    if hasattr(module, "_check_arg"):
        take_over(module._check_arg, _checked)


def _checked(original: Any, args: Any, kwargs: Any) -> Any:
    """On no TPU of torch_xla's; in precisions that ignite's CUDA code would not give here."""
    on_tpu, on_mps, amp_mode, scaler = args
    if not on_tpu:
        return original(*args, **kwargs)
    refuse_processes("ignite")
    if amp_mode or scaler:
        raise UnsupportedOpError(
            f"ignite's amp_mode={amp_mode!r}, scaler={scaler!r} on the xla device: they are for "
            "CUDA. Leave them out, and give model_fn=step, where step(model, x) calls the model "
            "under torch.autocast('xla', torch.bfloat16)"
        )
    return original(False, on_mps, amp_mode, scaler)


def _serial(module: Any) -> None:
    take_over(module._SerialModel.device, _device)


def _device(original: Any, args: Any, kwargs: Any) -> torch.device:
    return device_for(original(*args, **kwargs))
